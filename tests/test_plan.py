"""Plans and parameters, without a GPU: structs against the C++ compiler, texts, the choice of
families and tiles.
"""

import itertools
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import families, jit, params, source, tensormap
from cuflash.families import Access, Device, choose, device_of, portable
from cuflash.families.portable import Tile
from cuflash.plan import CPP_TYPES, ITEM_BYTES, Plan, round_up, tile_bytes
from cuflash.problem import Band, Problem

HOPPER = replace(device_of(90), l2_bytes=50 << 20, name="a GPU")
DTYPES = tuple(CPP_TYPES)


def problem_of(dtype="float16", dim=64, dim_v=64, length=128, keys=None, **options):
    keys = length if keys is None else keys
    facts = dict(batch=(1,), num_heads=2, num_kv_heads=1, scale=0.125, band=None) | options
    return Problem(
        dtype=dtype, seqlen_q=length, seqlen_k=keys, head_dim=dim, head_dim_v=dim_v, **facts
    )


# structs ------------------------------------------------------------------------------------------


def _sentinels(kinds):
    """A distinct value for each place, and its bytes."""
    for number, kind in enumerate(kinds):
        _, code, count = params.KINDS[kind]
        for n in range(count):
            value = 0x51000000 + 256 * number + n
            if kind == "map":
                yield kind, n, value.to_bytes(4, "little") * 32, value.to_bytes(4, "little") * 32
                continue
            if code[-1] in "Pq":
                value = value << 32 | value
            value = float(value) if code == "d" else value
            yield kind, n, value, struct.pack("@" + code[-1], value)


def _offsets(table):
    """Where the packer puts each field: found in its bytes, not computed as it does."""
    kinds = [kind for _, kind in params.TABLES[table]]
    places = list(_sentinels(kinds))
    layout = params.layout(table)
    values = [value for _, _, value, _ in places]
    maps, values = b"".join(values[: layout.num_maps]), values[layout.num_maps :]
    count = layout.num_pointers
    room = layout.room(layout.rest(*values[count:]))
    room.point(*values[:count])
    for number in range(layout.num_maps):
        room.write_map(number, number, maps[128 * number : 128 * (number + 1)])
    pieces = room.struct.raw
    offsets = [pieces.index(piece) for _, n, _, piece in places if n == 0]
    return dict(zip((name for name, _ in params.TABLES[table]), offsets, strict=True))


@pytest.fixture
def compiles(nvrtc):
    """Asserts that NVRTC accepts a text; the test is skipped where there is none."""
    return lambda text: jit.compile_text(text, "check", "compute_80")


def test_structs_are_those_of_the_compiler(compiles):
    lines = [
        source.unit("ptx/tma.cuh"),  # TensorMap, and types.cuh
        # NVRTC has no <cstddef>, and __builtin_offsetof from 13.5 on only.
        "#define offset_of(T, field) (unsigned long long)__INTADDR__(&((T*)0)->field)",
        "static_assert(sizeof(Strides) == 48 && offset_of(Strides, batch) == 0);",
        "static_assert(offset_of(Strides, head) == 24);",
        "static_assert(offset_of(Strides, row) == 32);",
        "static_assert(offset_of(Strides, col) == 40);",
        f"static_assert(kBatchDims == {params.BATCH_DIMS});",
    ]
    for table in params.TABLES:
        lines.append(f"namespace {table} {{ {params.text(table)}")
        lines.append(f"static_assert(sizeof(Params) == {params.layout(table).size});")
        lines += [
            f'static_assert(offset_of(Params, {name}) == {offset}, "{name}");'
            for name, offset in _offsets(table).items()
        ]
        lines.append("}")
    compiles("\n".join(lines))
    with pytest.raises(jit.CompileError, match="wrong"):
        compiles("\n".join(lines) + '\nstatic_assert(sizeof(combine::Params) == 1, "wrong");')


def test_pointers_come_first(monkeypatch):
    monkeypatch.setitem(params.TABLES, "mixed", [("q", "in"), ("n", "i32"), ("k", "in")])
    with pytest.raises(ValueError, match="mixed: pointers must come first"):
        params.Layout("mixed")


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_number_that_does_not_fit_its_field_raises(value):
    """C9: nothing is cut to 32 bits in silence."""
    with pytest.raises(struct.error):
        params.layout("combine").rest(2**40, value, 64)


def test_shared_memory_of_tiles_is_that_of_the_compiler(compiles):
    lines = [source.unit("tile/smem_tile.cuh")]
    for dtype in DTYPES:
        for cols in range(16, 257, 16):
            size = tile_bytes(32, cols, ITEM_BYTES[dtype])
            tile = f"SmemTile<{CPP_TYPES[dtype]}, 32, {cols}>"
            lines.append(f"static_assert({tile}::kBytes == {size});")
    compiles("\n".join(lines))


# plans --------------------------------------------------------------------------------------------

_constants = st.lists(
    st.tuples(
        st.from_regex(r"k[A-Z][a-z]{1,5}", fullmatch=True),
        st.one_of(st.booleans(), st.integers(-(2**31), 2**31 - 1), st.sampled_from(["f16", "u8"])),
    ),
    unique_by=lambda row: row[0],
)


def _read(text):
    """The constants that a plan's text defines."""
    rows = []
    for line in text.splitlines()[1:-1]:
        alias = re.fullmatch(r"    using (\w+) = (\w+);", line)
        number = re.fullmatch(r"    static constexpr (bool|int) (\w+) = (-?\w+);", line)
        if alias:
            rows.append(alias.groups())
        elif number.group(1) == "bool":
            rows.append((number.group(2), {"true": True, "false": False}[number.group(3)]))
        else:
            rows.append((number.group(2), int(number.group(3))))
    return tuple(rows)


@given(_constants, _constants)
def test_a_plans_text_says_all_of_it(first, second):
    plans = [Plan("k", "combine", 32, 0, tuple(rows)) for rows in (first, second)]
    for plan in plans:
        text = plan.text()
        assert text.startswith("struct Plan {\n") and text.endswith("};\n")
        assert repr(_read(text)) == repr(plan.constants)  # repr: True and 1 differ
        for name, value in plan.constants:
            assert plan[name] == value and f"{name}={value}" in str(plan)
    same = repr(plans[0].constants) == repr(plans[1].constants)
    assert (plans[0].text() == plans[1].text()) == same


@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_round_up(value, multiple):
    up = round_up(value, multiple)
    assert up % multiple == 0 and value <= up < value + multiple


# families -----------------------------------------------------------------------------------------


def test_devices():
    assert device_of(90) == Device(90, 232448, 233472, 132, name="sm_90")
    assert device_of(75).smem_per_block == 64 * 1024
    for capability in (70, 72, 91, 900, 0, -75):
        with pytest.raises(ValueError, match=f"sm_{capability} is not one of sm_75, sm_80"):
            device_of(capability)


def test_choose_takes_the_first_that_does_not_reject(monkeypatch):
    class Fast:
        NAME, DIRECTIONS, Tile = "fast", ("forward",), int
        reject = staticmethod(lambda problem, device, access: "it needs something else")

    monkeypatch.setattr(families, "families", lambda: (Fast, portable))
    access = Access(16, 16)
    facts = (problem_of(), HOPPER, access)
    assert choose(*facts, "forward") == (portable, [("fast", "it needs something else")])
    assert choose(*facts, "backward") == (portable, [("fast", "it has no backward kernel")])
    assert choose(*facts, "forward", Tile(64, 64, 4, 1)) == (portable, [])
    with pytest.raises(NotImplementedError, match="no kernel .*fast: it needs something else$"):
        choose(*facts, "forward", 5)
    old = Device(70, 96 * 1024, 96 * 1024, 80)
    message = "fast: it needs something else; portable: it needs compute capability 7.5.* 7.0"
    with pytest.raises(NotImplementedError, match=message):
        choose(problem_of(), old, access, "forward")


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 100))
def test_first_fit(sizes, room):
    problem, device = problem_of(), Device(80, room, 200, 1)
    table = dict.fromkeys(portable.FORWARD_TILES, range(len(sizes)))
    fitting = [n for n, size in enumerate(sizes) if size <= room]
    pick = (table, problem, device, None, sizes.__getitem__)
    if fitting:
        assert portable._tile_of("forward", *pick) == (fitting[0], sizes[fitting[0]])
    else:
        with pytest.raises(NotImplementedError, match=f"forward.*needs {sizes[-1]} bytes.*{room}"):
            portable._tile_of("forward", *pick)


def _backward_plan(problem, device, need_dq=True, tile=None):
    return portable.backward_plan(
        problem,
        device,
        Access(16, 16),
        need_dq=need_dq,
        need_dkv=True,
        deterministic=True,
        tile=tile,
    )


_tiles = st.builds(
    Tile,
    st.sampled_from([16, 32, 48, 64, 128, 256]),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(1, 8),
    st.just(1),
)


@given(_tiles, st.integers(1, 16).map(lambda n: 16 * n))
def test_dq_warps_tile_the_block(tile, slice_dim):
    """Every 16 x 16 piece of dQ belongs to one warp, all warps have the same number of pieces, and
    no other division that fits uses more warps.
    """
    along_m, along_d = portable._dq_warps(tile, slice_dim)
    assert 1 <= along_m * along_d <= tile.warps
    rows, cols = tile.block_m // along_m, slice_dim // along_d
    assert rows % 16 == 0 and cols % 16 == 0
    owned = np.zeros((tile.block_m // 16, slice_dim // 16), int)
    for warp in range(along_m * along_d):
        m, d = warp % along_m, warp // along_m
        owned[m * rows // 16 : (m + 1) * rows // 16, d * cols // 16 : (d + 1) * cols // 16] += 1
    assert (owned == 1).all()
    for m in range(1, tile.warps + 1):
        for d in range(1, tile.warps + 1):
            fits = tile.block_m % (16 * m) == 0 and slice_dim % (16 * d) == 0
            assert not (fits and along_m * along_d < m * d <= tile.warps)


@given(st.integers(1, 256), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_slices_cover_the_head_dimension(dim, slices, share):
    tile = Tile(32, 64, 4, 1, 1, slices, share)
    plan = _backward_plan(problem_of(dim=dim, dim_v=257 - dim), HOPPER, tile=tile)
    for size, part in ((dim, plan["kSliceDim"]), (257 - dim, plan["kSliceDimV"])):
        assert part % 16 == 0 and part * slices >= size
        assert (part - 16 * share) * slices < size  # none smaller does
    assert plan["kHeadDim"] == plan["kSliceDim"] * slices
    assert plan["kAccumTiles"] * 8 == plan["kHeadDim"]


def _plans(problem, device):
    plans = [_backward_plan(problem, device, need_dq) for need_dq in (False, True)]
    return plans + [
        portable.forward_plan(problem, device, Access(16, 16), stats=stats)
        for stats in (False, True)
    ]


_BY_LIMIT = {limit: capability for capability, limit in reversed(families._SMEM_KIB.items())}


@pytest.mark.parametrize("capability", sorted(_BY_LIMIT.values()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dimension_has_tiles(capability, dtype):
    """Bug 231: tiles come from the device's limit, for all head dims in both directions. Plans
    round head dims up to multiples of 16, so both ends of each such step stand for all.
    """
    device = device_of(capability)
    dims = [dim for step in range(0, 256, 16) for dim in (step + 1, step + 16)]
    for dim, dim_v in itertools.product(dims, dims):
        for plan in _plans(problem_of(dtype, dim, dim_v), device):
            assert plan["kSmemBytes"] == plan.smem_bytes <= device.smem_per_block
            assert plan.threads == 32 * plan["kWarps"]
            together = plan["kBlocksPerSm"] * (plan.smem_bytes + 1024)
            assert plan["kBlocksPerSm"] == 1 or together <= device.smem_per_sm
            assert plan["kHeadDim"] >= dim and plan["kHeadDimV"] * plan["kSlices"] >= dim_v


@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_tiles_are_the_last_resort(dtype):
    """Where tiles of 16 queries and 16 keys fit the shared memory, inputs are copied into them.
    16-bit types, whose operands come from there, always fit.
    """
    item = ITEM_BYTES[dtype]
    for table in (portable.FORWARD_TILES, portable.BACKWARD_TILES):
        for (size, _), tiles in table.items():
            assert size != 2 or not any(tile.direct for tile in tiles)
            assert not any(tile.direct for tile in tiles[:-1])
    for capability, dim in itertools.product(_BY_LIMIT.values(), range(16, 257, 16)):
        device = device_of(capability)
        for plan in _plans(problem_of(dtype, dim, dim), device):
            rows = 32 if plan.kernel == "fwd_portable" else 64  # q, k, v and dout of 16 rows each
            if plan["kDirect"]:
                assert rows * dim * item > device.smem_per_block * 3 // 4


def test_numbers_of_a_call_do_not_make_a_new_kernel():
    """Structure is compiled, numbers are passed."""
    base = problem_of(length=256, band=Band(-256, 0))
    plan = portable.forward_plan(base, HOPPER, Access(16, 16))
    others = [{"scale": 3.0}, {"band": Band(-7, 9)}, {"seqlen_q": 511}, {"batch": (5, 2)}]
    for change in [*others, {"num_heads": 8}, {"seqlen_k": 1}]:
        assert portable.forward_plan(replace(base, **change), HOPPER, Access(16, 16)) == plan
    for change in ({"scale": -1.0}, {"scale": 0.0}, {"band": None}, {"dtype": "bfloat16"}):
        assert portable.forward_plan(replace(base, **change), HOPPER, Access(16, 16)) != plan


# tuning -------------------------------------------------------------------------------------------


_TUNED = [("sm_80", "portable", *both) for both in itertools.product(("fwd", "bwd"), DTYPES)]
_TUNED += [
    ("sm_90a", "sm90", "fwd", "float16"),
    ("sm_90a", "sm90", "bwd", "bfloat16"),
    ("sm_90a", "portable", "fwd", "float16"),
]


@pytest.mark.parametrize("arch, family, direction, dtype", _TUNED)
def test_tuning_tries_tiles_that_the_kernels_take(
    compiles, monkeypatch, arch, family, direction, dtype
):
    """The table's rows come first; a printed row is the tile again; nothing is tried twice."""
    tune = pytest.importorskip("bench.tune")
    monkeypatch.setattr(tensormap, "missing", lambda: None)
    options = ["--dtype", dtype, "--direction", direction, "--head-dim", "96", "--arch", arch]
    options += [] if family == "sm90" else ["--family", family]
    setting = tune._setting(tune._parser().parse_args(options), None)
    assert setting.family.NAME == family
    rows = tune.candidates(setting)
    assert rows[0].from_table and any(not row.from_table for row in rows)
    assert len({row.plan for row in rows}) == len(rows)
    for row in rows:
        assert row.plan == setting.plan(row.tile)
        assert row.plan.smem_bytes <= setting.device.smem_per_block
        printed = tune.render(setting, row)
        assert eval(printed.split("#")[0].strip(" ,"), {"Tile": setting.family.Tile}) == row.tile
    with pytest.raises(ValueError, match="--family sm90: it needs compute capability 9.0"):
        hopper = ["--arch", "sm_80", "--family", "sm90"]
        tune._setting(tune._parser().parse_args([*options[:6], *hopper]), None)
