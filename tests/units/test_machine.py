"""Machines: the schema of files, errors of damaged files, the search, and the GEMM model."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ficco.errors import ConfigError
from ficco.machine import Collective, Copies, Gemm, Machine, Provenance, Tuned, configs, files
from ficco.machine import text as as_yaml
from ficco.machine.files import (
    Fingerprint,
    digest,
    dumps,
    find,
    load,
    loads,
    nearest,
    save,
    user_dir,
)
from ficco.machine.model import Count, OneOf, Points, Quantity, Thresholds, Topology, interpolate
from ficco.tools.tune.fits import ENOUGH, Sample, errors, fit

MEASURED = Provenance("measured", "2026-11-21", command="ficco tune", torch="2.11.0")
SMALL = Machine(
    "small",
    "Some GPU",
    2,
    topology=Topology("mesh", 64e9, MEASURED),
    copies=Copies(2, 15e-6, 3e-6, ((65536.0, 1e9), (2097152.0, 5e10)), MEASURED),
)
TEXT = dumps(SMALL)

#: The required keys of a file, without its end.
HEAD = "name: a\naccelerator: a\nranks: 1\n"

SHIPPED = sorted(path.stem for path in configs().glob("*.yaml"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for the user's files; the environment names no machine."""
    folder = tmp_path / "user"
    monkeypatch.setenv("FICCO_CONFIG_DIR", str(folder))
    monkeypatch.delenv("FICCO_MACHINE", raising=False)
    return folder


def test_quantities_are_read_and_printed() -> None:
    for text, unit, value in (
        ("1.276 ms", "s", 1.276e-3), ("0 s", "s", 0.0), ("2 MiB", "B", 2097152.0),
        ("80 GB", "B", 80e9), ("1.3074 PFLOP/s", "FLOP/s", 1.3074e15), ("100 B", "B", 100.0),
    ):  # fmt: skip
        assert files.quantity(text, unit) == value and files.quantity_text(value, unit) == text
    others = {"1.5 KiB": 1536.0, "1.5e11 B": 1.5e11, "  7  kB ": 7e3}
    assert [files.quantity(text, "B") for text in others] == [*others.values()]
    for wrong in ("64 Gb/s", "64", "64 us", "64GB/s", "GB/s", "1 mB/s", "1 2 B/s", 64e9, None, ""):
        with pytest.raises(ValueError, match="required a quantity in B/s such as '.*', got "):
            files.quantity(wrong, "B/s")


@given(st.sampled_from(list(files.PREFIXES)), st.floats(1e-15, 1e18))
def test_printed_quantities_are_the_same_when_read(unit: str, value: float) -> None:
    assert files.quantity(files.quantity_text(value, unit), unit) == value


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field, by its annotation."""
    if type(None) in get_args(hint):
        (inner,) = (arm for arm in get_args(hint) if arm is not type(None))
        return st.none() | values(inner)
    kind, note = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
    if is_dataclass(kind):
        return blocks(kind)
    if isinstance(note, OneOf):
        return st.sampled_from(note.texts)
    if isinstance(note, Points):
        size = st.floats(1e-3, 1e15)
        return st.dictionaries(size, size, min_size=1, max_size=3).map(
            lambda points: tuple(sorted(points.items()))
        )
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        if rest == [Ellipsis]:
            least = int(first == Count)  # tiles and splits
            return st.lists(values(first), min_size=least, max_size=2).map(tuple)
        return st.tuples(*map(values, (first, *rest)))
    if kind is str:
        return st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
    note = note or Quantity()
    lower = max(x for x in (note.least, note.above, 0.0) if x is not None)
    if kind is int:
        return st.integers(int(lower), 10**6)
    upper = 1e15 if note.most is None else note.most
    return st.floats(lower, upper, exclude_min=note.above is not None, allow_subnormal=False)


def blocks(kind: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    strategies = {f.name: values(hints[f.name]) for f in fields(kind) if f.compare}
    if kind is Thresholds:
        pair = st.tuples(strategies.pop("low"), strategies.pop("high")).map(sorted)
        return st.builds(lambda lh, **rest: Thresholds(*lh, **rest), pair, **strategies)
    return st.builds(kind, **strategies)


@settings(max_examples=60, deadline=None)
@given(blocks(Machine))
def test_a_machine_is_equal_after_a_round_trip(machine: Machine) -> None:
    loaded = loads(dumps(machine))
    assert loaded == machine and digest(loaded) == digest(machine)


def test_a_saved_machine_is_equal_when_loaded_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "small.yaml"
    save(SMALL, path)
    first, texts_read = load(path), []
    assert first == SMALL and first.source == str(path)
    assert "bandwidth: 64 GB/s" in path.read_text() and "- [64 KiB, 1 GB/s]" in path.read_text()
    parse = as_yaml.parse
    monkeypatch.setattr(as_yaml, "parse", lambda text: texts_read.append(text) or parse(text))
    assert load(path) is first and not texts_read
    renamed = replace(SMALL, name="other")
    path.write_text(dumps(renamed))
    assert load(path) == renamed and texts_read == [dumps(renamed)]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files(name: str) -> None:
    machine = load(configs() / f"{name}.yaml")
    assert machine.name == name and {"cpu", "h100-8", "h200-4", "mi300x-8"} < set(SHIPPED)
    assert loads(dumps(machine)) == machine
    assert find(None, Fingerprint(machine.accelerator, machine.ranks)) == machine
    for field in fields(machine):
        block = getattr(machine, field.name)
        if is_dataclass(block):
            by = block.provenance
            assert by.source == "data sheet" or by.note or by.command, field.name
            assert by.source not in ("measured", "fitted") or by.torch or name == "mi300x-8"


def without(line: str) -> str:
    """Return the small machine's file without a line, which must be unique."""
    assert sum(text.strip() == line for text in TEXT.splitlines()) == 1, line
    return "".join(text for text in TEXT.splitlines(True) if text.strip() != line)


def replaced(old: str, new: str) -> str:
    assert TEXT.count(old) == 1, old
    return TEXT.replace(old, new)


CROSSED = "thresholds:\n  low: 2 FLOP\n  high: 1 FLOP\n  provenance: {source: assumed}\n..."
BANDWIDTH = "topology.bandwidth"


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        (without("ranks: 2"), "ranks", "is missing; required a number of at least 1"),
        (without("kind: mesh"), "topology.kind", "is missing; required one of mesh, switch"),
        (replaced("engines:", "motors:"), "copies.motors", "is unknown; known here are engines,"),
        (replaced("ranks: 2", "ranks: 0"), "ranks", "required a number of at least 1, got 0"),
        (replaced("ranks: 2", "ranks: 1.5"), "ranks", "required a whole number, got 1.5"),
        (replaced("ranks: 2", "ranks: true"), "ranks", "required a number, got True"),
        (replaced("ranks: 2", "ranks: .nan"), "ranks", "required a number of at least 1, got nan"),
        (replaced("ranks: 2", "ranks: "), "ranks", "required a number, got None"),
        (replaced("name: small", "name: 7"), "name", "required a text, got 7"),
        (replaced("kind: mesh", "kind: ring"), "topology.kind", "one of mesh, switch, got 'ring'"),
        (replaced("64 GB/s", "64 GHz"), BANDWIDTH, "a quantity in B/s such as '64 GB/s'"),
        *(
            (replaced("64 GB/s", f"{value} GB/s"), BANDWIDTH, f"in B/s above 0, got '{value} GB/s'")
            for value in ("0", "inf", "-1")
        ),
        (replaced("  kind", "  sharing: 1.5\n  kind"), "topology.sharing", "at most 1, got 1.5"),
        (replaced("15 us", "1e400 us"), "copies.latency", "got '1e400 us', which is not finite"),
        (replaced("15 us", "-15 us"), "copies.latency", "a quantity in s of at least 0, got '-15"),
        *(
            (replaced("[2 MiB, 50 GB/s]", point), f"copies.curve[1]{at}", expected)
            for point, at, expected in (
                ("[2 KiB, 50 GB/s]", "", "required sizes that rise from point to point, got '2 K"),
                ("[64 KiB, 50 GB/s]", "", "required sizes that rise"),
                ("[2 MiB]", "", "a point [B, B/s], got"),
                ("[2 us, 50 GB/s]", "[0]", "in B such as"),
                ("[2 MiB, 0 B/s]", "[1]", "in B/s above 0"),
            )
        ),
        (HEAD + "all_gather:\n  curve: []\n...", "all_gather.curve", "a list of points [B, s]"),
        (HEAD + CROSSED, "thresholds", "required high of at least low"),
        (HEAD + "topology: 5\n...", "topology", "required the keys of a topology, got 5"),
        ("a: [1\n...", "line 2", "required YAML: "),
        ("a: \0\n...", "file", "required YAML: "),
        ("a: !!python/object:os.system {}\n...", "line 1", "required YAML: "),
        ("[" * 100 + "\n...", "file", "required YAML: nested more than 20 deep"),
        (TEXT.replace("ranks: 2", "ranks: 2\nranks: 2"), "line 4", "'ranks' is given twice"),
        ("", "file", "ends early: required the line '...' at its end"),
        ("a: [1\n", "line 2", "it also ends early: required the line '...'"),
        (TEXT + TEXT, "line", "required YAML: "),
    ],
)
def test_a_damaged_file_names_the_place(text: str, key: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    error = caught.value
    assert error.source == str(path) and expected in error.expected
    assert error.key == key or (key == "line" and error.key.startswith("line "))
    assert str(error).startswith(f"{path}: {error.key}: ")


def test_a_file_that_is_nested_too_deep_or_cut_short_or_cannot_be_read(tmp_path: Path) -> None:
    for opening in ("[", "- "):  # PyYAML 6.0.4 has its own limit and message
        with pytest.raises(ConfigError, match="required YAML: .*nest"):
            loads(opening * 100000 + "\n...")
    for end in range(0, len(TEXT) - 2, 7):
        with pytest.raises(ConfigError):
            loads(TEXT[:end])
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n...")
    for name, message in (("none", "cannot be read: No such"), ("latin", "required text in UTF-8")):
        with pytest.raises(ConfigError, match=f"file: {message}"):
            load(tmp_path / f"{name}.yaml")


def test_values_that_a_file_may_hold() -> None:
    assert loads(TEXT.replace("'2026-11-21'", "2026-11-21")) == SMALL  # a date without quotes
    assert loads(replaced("ranks: 2", "ranks: 2\nmargin: 5e-2")).margin == 0.05  # without a point
    unknown = Tuned(
        "all_gather_matmul", (8, 8), 4, 4, "bfloat16", "gone:knob=1", "serial",
        (1e-3, 2e-3), (3e-3, 4e-3), MEASURED,
    )  # fmt: skip
    assert loads(dumps(replace(SMALL, tuned=(unknown,)))).tuned == (unknown,)
    tiled = replace(SMALL, gemm=Gemm(1e12, 1, 0, 1, 0, 1e9, MEASURED, splits=(1, 2)))
    late, twice = replace(unknown, seconds=(1.0, 0.0)), (unknown, unknown)
    for machine, changes, message in (
        (replace(SMALL, tuned=twice), ("bfloat16", "int4", 1), r"\[0\]\.dtype: required one of bf"),
        (replace(SMALL, tuned=(late,)), ("", ""), r"\[0\]\.seconds\[1\]: required .* above 0"),
        (tiled, ("splits: [1, 2]", "splits: []"), "gemm: required at least one number in splits"),
    ):
        with pytest.raises(ConfigError, match=message):
            loads(dumps(machine).replace(*changes))


@pytest.mark.parametrize("moment", ["replace", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, None], ids=str)
def test_a_save_that_fails_or_is_interrupted_changes_nothing(
    moment: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.yaml"
    save(SMALL, path)
    error = OSError(code, os.strerror(code)) if code else KeyboardInterrupt("by its user")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, moment, fail)
    message = f"file: cannot be written: {os.strerror(code)}" if code else "by its user"
    with pytest.raises(ConfigError if code else KeyboardInterrupt, match=message):
        save(replace(SMALL, ranks=3), path)
    assert load(path) == SMALL and os.listdir(tmp_path) == ["small.yaml"]


def test_a_process_that_dies_while_it_saves_leaves_no_machine(home: Path) -> None:
    save(SMALL, home / "small.yaml")
    child = os.fork()
    if not child:
        os.fsync = lambda _: os._exit(9)
        save(replace(SMALL, ranks=3), home / "small.yaml")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert load(home / "small.yaml") == SMALL and len(os.listdir(home)) == 2
    assert [find(None, Fingerprint("Some GPU", ranks)) for ranks in (2, 3)] == [SMALL, None]


def test_an_invalid_machine_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    (tmp_path / "link.yaml").symlink_to(path)
    save(SMALL, tmp_path / "link.yaml")
    assert (tmp_path / "link.yaml").is_symlink()
    for bandwidth in (float("nan"), float("inf"), -1.0, 0.0):
        with pytest.raises(ConfigError, match="topology.bandwidth: required a quantity in B/s"):
            save(replace(SMALL, topology=Topology("mesh", bandwidth, MEASURED)), path)
    assert load(path) == SMALL
    with pytest.raises(ConfigError, match="file: cannot be written: "):
        save(SMALL, path / "small.yaml")


def test_the_order_in_which_machines_are_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Fingerprint("nvidia h200", 4)
    assert find(None, host) == load(configs() / "h200-4.yaml")

    own = replace(SMALL, name="own", accelerator="NVIDIA H200", ranks=4)
    save(own, home / "own.yaml")
    assert find(None, host) == own

    monkeypatch.setenv("FICCO_MACHINE", "mi300x-8")
    assert find(None, host) == load(configs() / "mi300x-8.yaml")

    other = replace(SMALL, name="other")
    save(other, tmp_path / "other.yaml")
    assert find(str(tmp_path / "other.yaml"), host) == other
    assert find("own", host) == own

    save(replace(own, name="cpu"), home / "cpu.yaml")
    assert find("cpu", None) == replace(own, name="cpu")  # takes precedence over the shipped file

    machine = replace(SMALL, also=("Some GPU 80GB",))
    for name, count, fits in (
        ("some gpu", 2, True), ("SOME GPU 80gb", 2, True),
        ("Some GPU", 4, False), ("Some", 2, False),
    ):  # fmt: skip
        assert Fingerprint(name, count).matches(machine) == fits
    monkeypatch.delenv("FICCO_MACHINE")
    assert find(None, Fingerprint("Nobody's", 2)) is find(None, None) is None


def test_an_unknown_name_lists_the_machines(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(SMALL, home / "small.yaml")
    listed = "required a file, or one of cpu, .* h200-4, mi300x-8, small "
    for name in ("nothing", "~nobody-of-this-name/x", "x" * 5000, "x\0y"):
        with pytest.raises(ConfigError, match=listed) as caught:
            find(name, None)
        assert caught.value.source == "machine"
    monkeypatch.setenv("FICCO_MACHINE", "nothing")
    with pytest.raises(ConfigError, match=f"nothing: {listed}") as caught:
        find(None, None)
    assert caught.value.source == "FICCO_MACHINE"


def test_unreadable_files_of_the_user_are_passed_over(home: Path, monkeypatch: Any) -> None:
    save(SMALL, home / "b.yaml")
    half = TEXT[: len(TEXT) // 2]
    (home / "a.yaml").write_text(half)
    with pytest.warns(UserWarning, match=r"passed over: .*a\.yaml: file: ends early") as warned:
        assert find(None, Fingerprint("Some GPU", 2)) == SMALL
        assert nearest(Fingerprint("Some GPU", 3)) == SMALL  # reads the same files
    assert [Path(w.filename).name for w in warned] == ["test_machine.py"]  # once, with this place
    with pytest.raises(ConfigError, match="ends early"):
        find("a", None)
    assert (home / "a.yaml").read_text() == half
    listdir = os.listdir

    def denied(folder: Path) -> list[str]:  # like the folder of another user
        if Path(folder) == user_dir():
            raise PermissionError(errno.EACCES, "Permission denied")
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.warns(UserWarning, match=rf"passed over: {user_dir()}: Permission denied"):
        machine = find(None, Fingerprint("NVIDIA H200", 4))
    assert machine is not None and machine.name == "h200-4"


def test_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # a user without a name
    for variable, folder in (
        ("FICCO_CONFIG_DIR", tmp_path / "user"),
        ("XDG_CONFIG_HOME", tmp_path / "ficco"),
        ("HOME", tmp_path / ".config/ficco"),
    ):
        assert user_dir() == folder
        monkeypatch.delenv(variable)
    assert user_dir() == Path("/nonexistent/.config/ficco")


def test_digests_are_of_facts() -> None:
    annotated = replace(SMALL.topology, provenance=Provenance("assumed", note="other"))
    integral = replace(SMALL.topology, bandwidth=int(64e9))  # equal to the float
    for same in ({"topology": annotated, "source": "elsewhere"}, {"topology": integral}):
        assert digest(replace(SMALL, **same)) == digest(SMALL)
    assert 0 <= digest(SMALL) < 2**40
    moved = {"copies": None, "kernel_copies": SMALL.copies}
    changes: list[dict[str, Any]] = [{}, {"ranks": 4}, {"margin": 0.03}, {"copies": None}, moved]
    changes.append({"copies": replace(SMALL.copies, gap=3.0001e-6)})
    assert len({digest(replace(SMALL, **change)) for change in changes}) == len(changes)


def test_curves_are_straight_in_logarithms() -> None:
    curve = ((1.0, 10.0), (100.0, 1000.0), (200.0, 1000.0))
    for size, value in ((10.0, 100.0), (0.1, 10.0), (150.0, 1000.0), (1e9, 1000.0)):
        assert interpolate(curve, size) == pytest.approx(value)
    assert interpolate(((5.0, 7.0),), 1.0) == interpolate(((5.0, 7.0),), 9.0) == 7.0
    # Beyond its curve a collective has the rate of the end of the curve.
    collective = Collective(((1.0, 2.0), (4.0, 8.0)), MEASURED)
    assert [collective.seconds(size) for size in (0.5, 2.0, 8.0)] == pytest.approx([2.0, 4.0, 16.0])


# The GEMM model, by hand: four processors of 250 operations per second each, one tile of 10 x 10.

WAVES = Gemm(
    peak=2000.0, units=4, launch=0.0, efficiency=0.5, start=1.0, bandwidth=1e30,
    provenance=MEASURED, tile_rows=(10,), tile_cols=(10,),
)  # fmt: skip


def test_waves_the_parts_of_a_tile_and_memory_limits() -> None:
    # A tile takes 2 * 10 * 10 * k / 250 seconds.
    for m, n, batch, waves, filled in (
        (10, 10, 1, 1, 0.25), (20, 20, 1, 1, 1.0), (21, 20, 1, 2, 1.5), (40, 40, 1, 4, 4.0),
        (1, 1, 1, 1, 0.25), (10, 10, 5, 2, 1.25),
    ):  # fmt: skip
        assert WAVES.seconds(m, n, 5, batch=batch) == pytest.approx(1.0 + waves * 4.0)
        assert WAVES.times(m, n, 5, batch=batch)[1] == pytest.approx(filled * 4.0)
    gemm = replace(WAVES, prologue=0.5, step=64.0, write=400.0)
    # 0.5 + 5 terms of 1 second + 4 s of operations + 10 * 10 elements at 100 bytes per second; a
    # wide result is read and written, 4 bytes each.
    for options, writes in (({}, 2.0), ({"itemsize": 4}, 4.0), ({"wide": True}, 8.0)):
        assert gemm.seconds(10, 10, 5, **options) == pytest.approx(1.0 + 0.5 + 5.0 + 4.0 + writes)
    assert gemm.seconds(10, 10, 5, itemsize=4, wide=True) == gemm.seconds(10, 10, 5, wide=True)
    gemm = replace(WAVES, peak=1e30, bandwidth=100.0)
    # (10 * 5 + 5 * 10 + 10 * 10) * 2 bytes; a batch shares its right operand.
    for options, nbytes in (
        ({}, 400), ({"batch": 3}, (3 * 50 + 50 + 3 * 100) * 2), ({"wide": True}, 200 + 100 * 8)
    ):  # fmt: skip
        assert gemm.seconds(10, 10, 5, **options) == pytest.approx(1.0 + nbytes / 100)
    seconds = replace(WAVES, bandwidth=100.0).seconds(10, 10, 5)  # 4 s and 4 s
    assert seconds == pytest.approx(1.0 + 4.0 * 2 ** (1 / 3))
    # A product that accumulates also reads the sum.
    adds, overwrites = (gemm.seconds(10, 10, 5, adds=adds) for adds in (True, False))
    assert adds - overwrites == pytest.approx(10 * 10 * 2 / 100)


def test_other_dtypes_nothing_to_do_and_a_power_limit() -> None:
    gemm = replace(WAVES, shares=((2.0, 1.0), (4.0, 0.5), (8.0, 0.25)))
    for itemsize, seconds in ((4, 1.0 + 8.0), (8, 1.0 + 16.0)):
        assert gemm.seconds(20, 20, 5, itemsize=itemsize) == pytest.approx(seconds)
    for size in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        assert gemm.times(*size) == (0.0, 0.0)
    assert gemm.seconds(1, 1, 1, batch=0) == 0.0
    hot = replace(WAVES, burst=2.0, sustained=0.8)
    assert [hot.heated(s) for s in (0.0, 1.0, 2.0, 6.0)] == pytest.approx([0.0, 1.0, 2.0, 7.0])
    assert WAVES.heated(1e9) == 1e9


H200 = load(configs() / "h200-4.yaml").gemm
assert H200 is not None
SIZES = st.integers(1, 40000)


@settings(max_examples=200, deadline=None)
@given(SIZES, SIZES, SIZES, st.integers(1, 8), st.sampled_from([2, 4, 8]), st.booleans())
def test_times_are_sane(m: int, n: int, k: int, batch: int, itemsize: int, wide: bool) -> None:
    def seconds(gemm: Gemm, m: int, n: int, k: int, batch: int = batch) -> float:
        return gemm.seconds(m, n, k, batch=batch, itemsize=itemsize, wide=wide)

    time = seconds(H200, m, n, k)
    assert time >= 2.0 * batch * m * n * k / H200.peak
    assert H200.times(m, n, k, batch=batch, itemsize=itemsize, wide=wide)[1] <= time
    # More work takes no less time.
    for larger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k), (m, n, k, batch + 1)):
        assert seconds(H200, *larger) >= time
    # Two halves may split k although the whole does not, and are hardly faster.
    assert 2 * time >= 0.8 * seconds(H200, 2 * m, n, k)
    assert seconds(replace(H200, bandwidth=H200.bandwidth / 2), m, n, k) >= time
    assert math.isfinite(time)


def sampled(gemm: Gemm, sizes: list[tuple[int, int, int]], **rest: Any) -> list[Sample]:
    full = {"batch": 1, "itemsize": 2, "wide": False, **rest}
    return [Sample(*mnk, **full, seconds=gemm.seconds(*mnk, **full)) for mnk in sizes]


GRID = [
    (m, n, k) for m in (64, 512, 3000, 9000) for n in (256, 2000, 8000) for k in (512, 2048, 9000)
]


def test_a_fit_recovers_the_machine_of_the_samples_despite_outliers() -> None:
    truth = replace(H200, shares=((2.0, 1.0), (4.0, 0.1)))
    samples = sampled(truth, GRID) + sampled(truth, GRID[::3], wide=True)
    samples += sampled(truth, GRID[::4], batch=3) + sampled(truth, GRID[::3], itemsize=4)
    assert len(samples) >= ENOUGH
    slow = [replace(s, seconds=3 * s.seconds) if i % 12 == 0 else s for i, s in enumerate(samples)]
    fitted = fit(slow, units=132, peak=truth.peak)
    assert errors(fitted, samples).mean < 0.01
    unseen = sampled(truth, [(1000, 1500, 6000), (5000, 700, 3000), (128, 12000, 1000)])
    assert errors(fitted, unseen).worst < 0.03
    assert fitted.efficiency == pytest.approx(truth.efficiency, rel=0.03)
    assert fitted.bandwidth == pytest.approx(truth.bandwidth, rel=0.1)
    assert dict(fitted.shares)[4.0] == pytest.approx(0.1, rel=0.05)


def test_a_fit_of_few_samples_leaves_waves_out() -> None:
    for count in (1, 2, 3):
        few = sampled(H200, GRID[-count:])
        assert errors(fit(few, units=132, peak=H200.peak), few).worst < 0.1
    truth = replace(
        WAVES, peak=1e11, units=1, efficiency=0.9, start=2e-5, bandwidth=1e10,
        tile_rows=(1,), tile_cols=(1,), shares=((4.0, 1.0),),
    )  # fmt: skip
    sizes = [(m, n, k) for m in (8, 64, 512) for n in (16, 128) for k in (32, 256, 1024)]
    samples = sampled(truth, sizes, itemsize=4)
    assert len(samples) < 20
    fitted = fit(samples)
    assert (fitted.tile_rows, fitted.tile_cols, fitted.splits) == ((1,), (1,), (1,))
    assert errors(fitted, samples).worst < 0.02
    assert fitted.peak * fitted.efficiency == pytest.approx(9e10, rel=0.05)
    assert fitted.start == pytest.approx(2e-5, rel=0.05)


def test_a_fit_keeps_known_values_that_samples_do_not_determine() -> None:
    truth = replace(H200, shares=((2.0, 1.0), (4.0, 0.1), (8.0, 0.05)), burst=2e-3, sustained=0.8)
    fitted = fit(sampled(truth, GRID), units=132, known=truth)
    assert (fitted.shares, fitted.burst, fitted.sustained) == (truth.shares, 2e-3, 0.8)
    fitted = fit(sampled(truth, GRID, itemsize=4), units=132, known=truth)
    assert fitted.shares == ((4.0, 1.0), (8.0, pytest.approx(0.5)))


def test_the_errors_of_a_model_on_its_own_times_are_none() -> None:
    truth = replace(H200, shares=((2.0, 1.0), (4.0, 0.1)))
    for itemsize in (1, 2, 3, 4, 8):  # including dtypes without a share
        assert errors(truth, sampled(truth, GRID, itemsize=itemsize)).worst < 1e-9
    # With few rows for each of many matrices only memory counts.
    few = sampled(H200, [(16, n, k) for _, n, k in GRID[:9]], batch=9, rights=9)
    assert errors(H200, few).worst < 1e-9
    fitted = fit(few, peak=H200.peak)
    assert fitted.bandwidth == pytest.approx(H200.bandwidth, rel=0.1)
    assert loads(dumps(replace(SMALL, gemm=fitted))).gemm == fitted


def test_a_fit_of_nonsense_is_refused() -> None:
    for seconds in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="required seconds above 0"):
            fit([Sample(1, 1, 1, 1, 2, False, seconds)])
