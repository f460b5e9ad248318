"""gpu_record.json agrees with the tree, and record.py refuses what proves nothing."""

import json

import conftest
import pytest
import record

FILES = {"kernels_cu/a.cu": "1", "cuflash/launch.py": "2"}
SESSION = {
    "exit_status": 0,
    "counts": {"passed": 5, "failed": 0, "skipped": 1},
    "deselected": 0,
    "chosen": [],
    "modules": ["test_a.py", "test_b.py"],
    "files": FILES,
    "device": "Some GPU",
    "date": "2000-01-01",
}
MODULES = ["test_a.py", "test_b.py"]


@pytest.mark.skipif(
    conftest.CUPY is not None, reason="a GPU run is itself what the record is made of"
)
def test_tree_matches_the_record():
    assert record.differences(record.load(), record.watched_files()) == []


def test_a_green_session_is_recorded():
    written = record.from_session(SESSION, FILES, MODULES)
    assert written["files"] == FILES and written["unverified"] == {}
    assert written["run"] == {
        "counts": SESSION["counts"],
        "device": "Some GPU",
        "date": "2000-01-01",
    }
    assert record.differences(written, FILES) == []


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"exit_status": 1}, "failed"),
        ({"counts": {"passed": 5, "failed": 1, "skipped": 0}}, "failed"),
        ({"counts": {"passed": 0, "failed": 0, "skipped": 9}}, "no test passed"),
        ({"deselected": 3}, "deselected"),
        ({"chosen": ["tests/test_a.py::test_x"]}, "single tests"),
        ({"modules": ["test_a.py"]}, "did not run test_b.py"),
        (
            {"files": {**FILES, "kernels_cu/a.cu": "old"}},
            "changed since the session: kernels_cu/a.cu",
        ),
        ({"files": {"kernels_cu/a.cu": "1"}}, "changed since the session: cuflash/launch.py"),
    ],
)
def test_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        record.from_session({**SESSION, **change}, FILES, MODULES)


def test_a_suite_in_parts():
    """Each part's modules and counts; nothing that one part did wrong is lost in the sum."""
    parts = [{**SESSION, "modules": [name], "seconds": 10} for name in MODULES]
    together = record.from_session(record.merged(parts), FILES, MODULES)
    assert together["run"]["counts"] == {"passed": 10, "failed": 0, "skipped": 2}
    assert together["run"]["seconds"] == 20 and together["files"] == FILES
    assert SESSION["counts"]["passed"] == 5
    for change, reason in (
        ({"exit_status": 1}, "failed"),
        ({"counts": {"passed": 5, "failed": 1, "skipped": 0}}, "failed"),
        ({"deselected": 1}, "deselected"),
        ({"chosen": ["tests/test_b.py::test_x"]}, "single tests"),
        ({"modules": ["test_a.py"]}, "did not run test_b.py"),
        ({"files": {}}, "differ in files"),
        ({"device": "Other GPU"}, "differ in device"),
    ):
        with pytest.raises(ValueError, match=reason):
            whole = record.merged([parts[0], {**parts[1], **change}])
            record.from_session(whole, FILES, MODULES)


@pytest.mark.parametrize(
    "stored, expected",
    [
        ({"files": FILES, "unverified": {}}, []),
        (
            {"files": {**FILES, "kernels_cu/a.cu": "0"}, "unverified": {}},
            ["kernels_cu/a.cu: changed since its last GPU run"],
        ),
        (
            {"files": {"kernels_cu/a.cu": "1"}, "unverified": {}},
            ["cuflash/launch.py: never run on a GPU"],
        ),
        (
            {"files": {**FILES, "kernels_cu/b.cu": "3"}, "unverified": {}},
            ["kernels_cu/b.cu: recorded, but no longer there"],
        ),
        ({"files": {"kernels_cu/a.cu": "1"}, "unverified": {"cuflash/launch.py": "why"}}, []),
        (
            {"files": FILES, "unverified": {"kernels_cu/a.cu": ""}},
            ["kernels_cu/a.cu: unverified without a reason"],
        ),
    ],
)
def test_differences(stored, expected):
    assert record.differences(stored, FILES) == expected


def test_command_line(tmp_path, monkeypatch, capsys):
    root = tmp_path / "tree"
    for name in ("tests", "kernels_cu/ptx", "cuflash/families"):
        (root / name).mkdir(parents=True)
    for name in (
        "kernels_cu/a.cu",
        "kernels_cu/ptx/b.cuh",
        "cuflash/families/c.py",
        "cuflash/api.py",
    ):
        (root / name).write_text(name)
    (root / "tests" / "test_a.py").write_text("")
    watched = record.watched_files
    monkeypatch.setattr(record, "ROOT", root)
    monkeypatch.setattr(record, "watched_files", lambda: watched(root))
    target, session = root / "record.json", root / "session.json"
    place = ["--record", str(target), "--session", str(session)]

    assert record.main(["--write", *place]) == 1 and not target.exists()
    assert "no session" in capsys.readouterr().err

    files = record.watched_files()
    assert sorted(files) == ["cuflash/families/c.py", "kernels_cu/a.cu", "kernels_cu/ptx/b.cuh"]
    session.write_text(json.dumps({**SESSION, "modules": ["test_a.py"], "files": files}))
    assert record.main(["--write", *place]) == 0
    assert record.differences(record.load(target), files) == []

    (root / "kernels_cu/a.cu").write_text("changed")
    assert record.main(["--write", *place]) == 1
    assert record.differences(record.load(target), record.watched_files())
    assert record.main(["--unverified", "kernels_cu/*", "no GPU at hand", *place]) == 0
    stored = record.load(target)
    assert stored["unverified"] == {"kernels_cu/a.cu": "no GPU at hand"}
    assert record.differences(stored, record.watched_files()) == []
    assert record.main(["--unverified", "nothing/*", "why", *place]) == 1
    assert record.main(["--unverified", "kernels_cu/*", " ", *place]) == 1
