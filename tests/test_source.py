"""Finding the CUDA sources and closing over their includes."""

import re

from cuflash import source


def test_closure_and_flatten():
    files = {
        "main.cu": '#include "a/one.cuh"\n#include "a/two.cuh"\nint main_line;\n',
        "a/one.cuh": '#pragma once\n  #  include "../base.cuh"\nint one;\n',
        "a/two.cuh": '#pragma once\n#include "../base.cuh"\n#include "one.cuh"\nint two;\n',
        "base.cuh": "#pragma once\nint base;\n",
        "other.cuh": "int other;\n",
    }
    closure = source.closure("main.cu", files.__getitem__)
    assert sorted(closure) == ["a/one.cuh", "a/two.cuh", "base.cuh", "main.cu"]
    text = source.flatten("main.cu", closure)
    for word in ("base", "one", "two", "main_line"):
        assert text.count(f"int {word};") == 1
    assert text.index("base") < text.index("int one") < text.index("int two")
    assert "int base" not in source.flatten("main.cu", closure, skip=("base.cuh",))
    place = {}
    for line in text.splitlines():  # what a compiler would call each line
        directive = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if directive:
            number, path = int(directive.group(1)), directive.group(2)
            continue
        place[line] = path, number
        number += 1
    assert place["int base;"] == ("base.cuh", 2)
    assert place["int one;"] == ("a/one.cuh", 3)
    assert place["int two;"] == ("a/two.cuh", 4)
    assert place["int main_line;"] == ("main.cu", 3)


def test_every_cuda_file_is_part_of_a_kernel():
    root = source.folder()
    used = {"types.cuh"}
    for path in root.glob("*.cu"):
        used |= set(source.closure(path.name, lambda p: (root / p).read_text(encoding="utf-8")))
    there = {p.relative_to(root).as_posix() for p in root.rglob("*.cu*") if p.is_file()}
    assert used == there


def test_sources_need_no_header_but_their_own():
    for path in source.folder().rglob("*.cu*"):
        assert not re.search(r"^\s*#\s*include\s*<", path.read_text(encoding="utf-8"), re.M), path
