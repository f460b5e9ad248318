"""The command line: `python -m cuflash COMMAND`. Exit status 0: done, 1: failed, 2: misused."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import runpy
import sys
import time

import numpy as np

import cuflash

from . import config
from .cli_common import Failure, UsageError, first_line, gpu_name, human, load_cupy
from .problem import DTYPES, LAYOUTS

_EPILOG = (
    "`python -m cuflash COMMAND --help` tells a command's options. "
    "Without a GPU everything runs on the NumPy path."
)


def main(argv=None):
    """Run one command. Returns the exit status."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command == "bench":
        args.rest = rest
    elif rest:
        parser.error(f"{args.command}: unknown arguments: {' '.join(rest)}")
    module, function = args.runs
    try:
        getattr(importlib.import_module(module, __package__), function)(args)
    except UsageError as error:
        print(f"cuflash {args.command}: {error}", file=sys.stderr)
        return 2
    except Failure as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output has gone. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        # The machine is at fault: memory, disk, driver, a missing library.
        print(f"cuflash {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def bench(args):
    """The bench command: the folder bench/ of the source tree, which is not installed."""
    spec = importlib.util.find_spec("bench.cases") if importlib.util.find_spec("bench") else None
    if spec is None:
        raise Failure(
            "bench: the folder bench/ is not importable; run this from the root of the source tree"
        )
    sys.argv = ["bench", *args.rest]
    runpy.run_module("bench", run_name="__main__")  # raises SystemExit with its own status


def info(args):
    """The info command; always succeeds, since what is missing is part of what it tells."""
    del args
    cupy, reason = load_cupy()
    print(f"cuflash   {cuflash.__version__}")
    print(f"Python    {platform.python_version()} on {platform.platform()}")
    print(f"NumPy     {np.__version__}")
    print(f"ml_dtypes {_version('ml_dtypes')}")
    print(f"CuPy      {_version('cupy')}")
    print(f"NVRTC     {_nvrtc()}")
    if cupy is None:
        print(f"devices   none: {reason}; calls on NumPy arrays run on the CPU")
    else:
        for number in range(cupy.cuda.runtime.getDeviceCount()):
            props = cupy.cuda.runtime.getDeviceProperties(number)
            capability = f"{props['major']}.{props['minor']}"
            print(
                f"device {number}  {gpu_name(cupy, number)}, compute capability {capability}, "
                f"{human(props['totalGlobalMem'])}"
            )
    folder = config.cache_dir()
    kernels = [path for suffix in ("cubin", "ptx") for path in folder.rglob(f"*.{suffix}")]
    size = human(sum(file.stat().st_size for file in kernels))
    print(f"cache     {folder}: {len(kernels)} kernels, {size}")


def _version(module):
    try:
        return getattr(__import__(module), "__version__", "of unknown version")
    except ImportError:
        return "not installed"
    except Exception as error:
        return f"installed, but does not load: {first_line(error)}"


def _nvrtc():
    try:
        from cupy.cuda import nvrtc

        return "{}.{}".format(*nvrtc.getVersion())
    except ImportError:
        return "not available without CuPy"
    except Exception as error:
        return f"does not load: {first_line(error)}"


def build(args):
    """The compile command."""
    from .ahead import compile_ahead

    count, start = 0, time.perf_counter()

    def report(record):
        nonlocal count
        count += 1
        print(f"[{time.perf_counter() - start:6.1f} s] {record}", flush=True)

    try:
        compile_ahead(
            args.arch,
            dtypes=tuple(args.dtype),
            head_dims=tuple(args.head_dim),
            head_dims_v=tuple(args.head_dim_v) if args.head_dim_v else None,
            causal=(False, True),
            backward=not args.no_backward,
            progress=report,
            jobs=args.jobs or config.processors(),
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    print(f"{count} kernels in {config.cache_dir()}, {time.perf_counter() - start:.1f} s")


def _parser():
    parser = argparse.ArgumentParser(prog="python -m cuflash", description=__doc__, epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (runs, text, add) in _COMMANDS.items():
        # bench has its own options, --help among them: they pass through unread.
        command = commands.add_parser(name, help=text, description=text, add_help=name != "bench")
        command.set_defaults(runs=runs)
        if add is not None:
            add(command)
    return parser


def _add_run(run):
    shapes = {"q": "(..., Hq, L, D)", "k": "(..., Hkv, S, D)", "v": "(..., Hkv, S, Dv)"}
    for name, shape in shapes.items():
        text = f"{shape}; two-byte voids are read as bfloat16"
        run.add_argument(name, metavar=f"{name}.npy", help=text)
    text = "file of the result; replaced when all of it is done"
    run.add_argument("-o", "--output", required=True, metavar="out.npy", help=text)
    text = "also write the log of each row's sum of exponentials"
    run.add_argument("--lse", metavar="lse.npy", help=text)
    text = "hide later keys; the diagonal ends at the last key (bottom_right, the default)"
    text += " or starts at the first (top_left)"
    kinds = ("bottom_right", "top_left")
    run.add_argument("--causal", nargs="?", const=True, default=False, choices=kinds, help=text)
    text = "query i stands at key i + N; for --causal or --window"
    run.add_argument("--causal-offset", type=int, metavar="N", help=text)
    text = "keys visible before and after a query's place, inclusive; `none` or -1: all"
    run.add_argument("--window", nargs=2, type=_side, metavar=("LEFT", "RIGHT"), help=text)
    run.add_argument("--scale", type=float, help="factor of the scores (1/sqrt(D))")
    run.add_argument("--layout", choices=LAYOUTS, default="bhsd", help="axes of all files (bhsd)")
    text = "tf32: less accuracy for float32 on a GPU"
    run.add_argument("--precision", choices=("tf32",), help=text)
    text = "at most N query rows a step (chosen by memory)"
    run.add_argument("--chunk", type=_at_least(1), metavar="N", help=text)
    _add_device(run)


def _add_check(check):
    check.add_argument("--cases", type=_at_least(1), default=200, metavar="N", help="(200)")
    check.add_argument("--seed", type=_at_least(0), default=0, metavar="S", help="(0)")
    check.add_argument("--only", type=_at_least(0), metavar="K", help="just case K of the seed")
    _add_jobs(check)
    _add_device(check)


def _add_demo(demo):
    text = "the text (this package's own source)"
    demo.add_argument("file", nargs="?", metavar="FILE", help=text)
    text = "use the first N bytes (32768 on a CPU, 262144 on a GPU)"
    demo.add_argument("--length", type=_at_least(2), metavar="N", help=text)
    _add_device(demo)


def _add_build(build):
    text = "sm_75, sm_80, sm_90a, ... (that of the GPU at hand)"
    build.add_argument("--arch", metavar="sm_XY", help=text)
    pair = ["float16", "bfloat16"]
    text = "(float16 bfloat16)"
    build.add_argument("--dtype", nargs="+", choices=DTYPES, default=pair, help=text)
    dim, text = _at_least(1), "(64 128)"
    build.add_argument("--head-dim", nargs="+", type=dim, default=[64, 128], metavar="D", help=text)
    text = "one for each head dim (the same)"
    build.add_argument("--head-dim-v", nargs="+", type=dim, metavar="DV", help=text)
    build.add_argument("--no-backward", action="store_true", help="forward kernels only")
    _add_jobs(build)


def _add_jobs(parser):
    text = "kernels built at once, each by a process (as many as there are processors)"
    parser.add_argument("--jobs", type=_at_least(1), metavar="N", help=text)


def _add_device(parser):
    kinds, text = ("auto", "cpu", "cuda"), "(a GPU when there is one)"
    parser.add_argument("--device", choices=kinds, default="auto", help=text)


def _at_least(least):
    def whole_number(text):
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: it must be at least {least}")
        return value

    return whole_number


def _side(text):
    return None if text.lower() == "none" else int(text)


# name: (module and function that run it, what it is, the function that adds options or None)
_COMMANDS = {
    "info": ((".__main__", "info"), "versions, devices, the kernel cache", None),
    "run": ((".cli_run", "run"), "attention from .npy files to a .npy file", _add_run),
    "check": ((".cli_check", "run"), "random calls against the float64 reference", _add_check),
    "demo": ((".cli_demo", "run"), "predict each byte of a text by attention", _add_demo),
    "bench": ((".__main__", "bench"), "speed beside other libraries (source tree)", None),
    "compile": ((".__main__", "build"), "build kernels ahead; needs CuPy, but no GPU", _add_build),
}


if __name__ == "__main__":
    sys.exit(main())
