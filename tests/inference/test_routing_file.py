"""The file of recorded routing: what was written is read again, passes come whole, and what is broken is named."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from base.errors import ConfigError
from inference.weights.routing_file import (
    RoutedLayer,
    RoutingHeader,
    RoutingWriter,
    read_routing,
)

pytestmark = pytest.mark.fast

HEADER = RoutingHeader("tiny", num_experts=4, top_k=2, layers=(1, 3))
VISITS = [
    RoutedLayer(0, 1, ((0, 0), (0, 1), (1, 0)), ((0, 3), (3, 0), (3, 1))),
    RoutedLayer(0, 3, ((0, 0), (0, 1), (1, 0)), ((2, 1), (1, 0), (2, 3))),
    RoutedLayer(1, 1, ((0, 2), (1, 1)), ((0, 1), (1, 2))),
    RoutedLayer(1, 3, ((0, 2), (1, 1)), ((3, 2), (0, 2))),
]


def write(path: Path, visits: list[RoutedLayer] = VISITS) -> Path:
    with RoutingWriter(path, HEADER) as writer:
        for visit in visits:
            writer.write(visit.pass_number, visit.layer, visit.tokens, visit.experts)
    return path


def notes_of(path: Path) -> tuple[list[RoutedLayer], list[str]]:
    notes: list[str] = []
    recording = read_routing(path, notes.append)
    assert recording.header == HEADER
    return recording.visits, notes


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "routing.jsonl")
    assert notes_of(path) == (VISITS, [])
    assert VISITS[0].counts == {0: 2, 1: 1, 3: 3}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "format": "mixtrain routing 1",
        "model": "tiny",
        "num_experts": 4,
        "top_k": 2,
        "layers": [1, 3],
        "num_tokens": None,
    }
    assert lines[3] == {"pass": 1, "layer": 1, "tokens": [[0, 2], [1, 1]], "experts": [[0, 1], [1, 2]]}


def test_a_file_without_its_last_end_of_line_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "routing.jsonl")
    path.write_bytes(path.read_bytes()[:-1])
    assert notes_of(path) == (VISITS, [])


def test_passes_reach_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    writer = RoutingWriter(path, HEADER)
    for visit, lines in zip(VISITS, (1, 1, 3, 3), strict=True):
        writer.write(visit.pass_number, visit.layer, visit.tokens, visit.experts)
        assert len(path.read_text().splitlines()) == lines
    writer.close()
    writer.close()
    assert notes_of(path) == (VISITS, [])


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "routing.jsonl")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"^--record-routing \(.*routing\.jsonl\) must be a new file, "):
        RoutingWriter(path, HEADER)
    assert path.read_bytes() == before
    for wrong in (tmp_path / "none" / "routing.jsonl", path / "routing.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=r"^--record-routing \("):
            RoutingWriter(wrong, HEADER)


def test_a_full_disk_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "routing.jsonl"
    with RoutingWriter(path, HEADER) as writer:
        monkeypatch.setattr(writer, "_file", FullDisk(writer._file))
        for visit in VISITS:
            writer.write(visit.pass_number, visit.layer, visit.tokens, visit.experts)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--record-routing: ") and str(path) in line and "No space left" in line
    assert read_routing(path).visits == []


class FullDisk:
    """A file on a disk without room."""

    def __init__(self, file: io.FileIO | None) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@pytest.mark.parametrize("compressed", [False, True])
def test_every_cut_leaves_the_whole_passes_in_front_of_it(tmp_path: Path, compressed: bool) -> None:
    data = write(tmp_path / "routing.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    path = tmp_path / "cut"
    for size in range(0, len(data), 7 if compressed else 2):
        path.write_bytes(gzip.compress(data[:size], 1) if compressed else data[:size])
        if size < ends[0] - 1:
            with pytest.raises(ConfigError, match=r"cut:1 must be a header of recorded routing"):
                read_routing(path)
            continue
        visits, notes = notes_of(path)
        lines = sum(size >= end - 1 for end in ends) - 1  # without its end a line is whole
        assert visits == VISITS[: lines - lines % 2], size
        is_cut = all(size not in (end, end - 1) for end in ends)
        assert not is_cut or f"{path}:{lines + 2} is an incomplete line" in notes[0]
        assert len(notes) == is_cut + lines % 2 and all("ignored" in note for note in notes), (size, notes)


def test_compressed_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl.gz"
    data = write(tmp_path / "routing.jsonl").read_bytes()
    half = len(data) // 2
    path.write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))
    assert notes_of(path) == (VISITS, [])
    path.write_bytes(gzip.compress(data)[:-12])
    visits, notes = notes_of(path)
    assert visits in (VISITS[:2], VISITS) and notes
    damaged = bytearray(gzip.compress(data))
    damaged[-8] ^= 1  # of the checksum
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"routing\.jsonl\.gz:1 cannot be decompressed: "):
        read_routing(path)


def line(**changes: object) -> str:
    fields = {"pass": 1, "layer": 1, "tokens": [[0, 2], [1, 1]], "experts": [[0, 1], [1, 2]]}
    return json.dumps({**fields, **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is damaged: it must be JSON"),
        ("", "is damaged: it must be JSON"),
        ("[" * 10000, "is damaged: it must be JSON"),
        ("[1]", "must be an object with pass, layer, tokens, experts"),
        ('{"pass": 1, "layer": 1, "tokens": []}', "must be an object with pass, layer, tokens, experts"),
        (line(layer="1"), "has layer '1': it must be an integer of at least 0"),
        (line(**{"pass": -1}), "has pass -1: it must be an integer of at least 0"),
        (line(layer=3), "has layer 3 of pass 1, but must have layer 1 of pass 1 or later"),
        (line(layer=2), "has layer 2 of pass 1"),
        (line(**{"pass": 0}), "has layer 1 of pass 0"),
        (
            line(tokens=[[0, 2]]),
            "tokens and experts must be two lists of equal length, at least 1, of lists of integers",
        ),
        (
            line(tokens=[], experts=[]),
            "tokens and experts must be two lists of equal length, at least 1, of lists of integers",
        ),
        (line(tokens=[0, 1]), "tokens and experts must be two lists of equal length, at least 1, of lists of integers"),
        (
            line(experts=[[0, 1], [1.5, 2]]),
            "tokens and experts must be two lists of equal length, at least 1, of lists of integers",
        ),
        (line(tokens=[[0, 2, 1], [1, 1]]), "has token [0, 2, 1]: it must be a pair of integers, prompt and position"),
        (line(experts=[[0, 1], [1]]), "has the choice [1]: it must be 2 different experts"),
        (line(experts=[[0, 1], [1, 1]]), "has the choice [1, 1]: it must be 2 different experts"),
        (line(experts=[[0, 1], [1, 4]]), "has expert 4, but the header declares experts 0 to 3"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "routing.jsonl", VISITS[:2])
    with path.open("a") as file:
        file.write(text + "\n" + line(layer=3) + "\n")
    with pytest.raises(ConfigError) as error:
        read_routing(path)
    assert str(error.value).startswith((f"{path}:4 ", f"{path}:4: "))
    assert said in str(error.value)


def test_a_layer_in_the_middle_of_a_pass_is_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    write(path, [VISITS[0], *VISITS[2:]])
    with pytest.raises(ConfigError, match=r":3 has layer 1 of pass 1, but must have layer 3 of pass 0"):
        read_routing(path)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "text",
        "{}",
        json.dumps({"format": "mixtrain routing counts 1", "model": "a", "num_experts": 4, "top_k": 2, "layers": [0]}),
        json.dumps({"format": "mixtrain routing 1", "model": "a", "num_experts": 4, "top_k": 5, "layers": [0]}),
        json.dumps({"format": "mixtrain routing 1", "model": "a", "num_experts": "4", "top_k": 2, "layers": [0]}),
        json.dumps({"format": "mixtrain routing 1", "model": "a", "num_experts": 4, "top_k": 2, "layers": []}),
        json.dumps({"format": "mixtrain routing 1", "model": "a", "num_experts": 4, "top_k": 2, "layers": [0, 0]}),
        json.dumps({"format": "mixtrain routing 1", "model": "a", "num_experts": 4, "layers": [0]}),
    ],
)
def test_a_file_without_our_header_is_no_recording(tmp_path: Path, header: str) -> None:
    path = tmp_path / "a_file"
    path.write_text(header + "\n" + line() + "\n")
    with pytest.raises(
        ConfigError, match=r"a_file:1 must be a header of recorded routing, as --record-routing writes it"
    ):
        read_routing(path)
    path.write_bytes(b"\xff\xfe" + header.encode())
    with pytest.raises(ConfigError, match=r"a_file:1 must be a header"):
        read_routing(path)
