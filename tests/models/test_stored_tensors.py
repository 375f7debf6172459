"""Boxes of logical tensors from the blocks that contain them; headers and streams of safetensors."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from base.errors import ConfigError
from memory.read_only_file import ReadOnlyFile
from models.huggingface.families import rules
from models.huggingface.families.rules import Heads
from models.huggingface.tensors import logical_blocks
from models.weight_files import stored_tensors
from models.weight_files.expected import wrong_cover
from models.weight_files.header import read_header
from models.weight_files.stored_tensors import BlockScale, RowBlock, StoredMatrix, as_matrix, fill, whole
from models.weight_files.writer import TensorSpec, Writer
from tests.models.helpers import write_tensors

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many bands, and rows that are longer than one."""
    monkeypatch.setattr(stored_tensors, "SCRATCH_BYTES", 256)
    monkeypatch.setattr(stored_tensors, "SCALED_BYTES", 64)


def _stored(tmp_path: Path, tensor: torch.Tensor, name: str = "t") -> StoredMatrix:
    """A tensor in a file, at no multiple of its size."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    (tmp_path / name).write_bytes(b"x" * 13 + content)
    return StoredMatrix(name, ReadOnlyFile(tmp_path / name), 13, tensor.dtype, *as_matrix(tensor.shape))


def _check(blocks: list[RowBlock], expected: torch.Tensor) -> None:
    """Boxes everywhere, of other types, strided and transposed."""
    num_rows, columns = expected.shape
    assert wrong_cover([box for block in blocks for box in block.boxes()], num_rows, columns) is None
    choose = random.Random(0)
    for number in range(12):
        at = (choose.randrange(num_rows), choose.randrange(columns)) if number else (0, 0)
        size = (
            (choose.randint(1, num_rows - at[0]), choose.randint(1, columns - at[1])) if number else (num_rows, columns)
        )
        box = expected[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]
        for dtype in (expected.dtype, torch.float64, torch.bfloat16):
            for target in (
                torch.empty(size, dtype=dtype),
                torch.empty(size[1], size[0], dtype=dtype).t(),
                torch.empty(2 * size[0], size[1] + 3, dtype=dtype)[::2, 1 : size[1] + 1],
            ):
                fill(target, blocks, at)
                assert torch.equal(target, box.to(dtype)), (number, at, size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 10), (5, 200), (40, 1), (1, 70)])
def test_whole_matrices_and_spans_of_columns(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    full = torch.randn(shape).to(dtype)
    _check([whole(_stored(tmp_path, full))], full)
    if shape[1] > 1:  # as two tensor parallel ranks split it
        half = shape[1] // 2
        left, right = _stored(tmp_path, full[:, :half], "l"), _stored(tmp_path, full[:, half:], "r")
        halves = [whole(left), RowBlock(right, 0, shape[0], 0, ((0, half, shape[1] - half),))]
        _check(halves, full)


HEADS = Heads(6, 2, 5)


def _grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Megatron's rows: of each group its queries, its key, its value."""
    group_rows = [kind_rows.chunk(HEADS.g) for kind_rows in (query, key, value)]
    return torch.cat([group_rows[kind][group] for group in range(HEADS.g) for kind in range(3)])


@pytest.mark.parametrize("columns", [1, 9])
def test_layouts_of_families(tmp_path: Path, columns: int) -> None:
    query, key, value = (torch.randn(size, columns) for size in (30, 10, 10))
    fused, ours = torch.cat([query, key, value]), _grouped(query, key, value)
    for layout, theirs, expected in (
        (rules.SAME, [query], query),
        (rules.TRANSPOSED, [query.t()], query),
        (rules.SAME, [key, value], torch.cat([key, value])),
        (rules.QKV, [query, key, value], ours),
        (rules.QKV_IN_ONE, [fused], ours),
        (rules.QKV_IN_ONE_TRANSPOSED, [fused.t()], ours),
    ):
        stored = [_stored(tmp_path, tensor, str(number)) for number, tensor in enumerate(theirs)]
        _check(logical_blocks(layout, stored, HEADS), expected)


@pytest.mark.parametrize("block", [(4, 8), (7, 100), None])
def test_scaled_rows_of_a_fused_matrix(tmp_path: Path, block: tuple[int, int] | None) -> None:
    full = (50 * torch.randn(50, 33)).to(torch.float8_e4m3fn)
    grid = (-(-50 // block[0]), -(-33 // block[1])) if block else ()
    scale = torch.rand(grid) + 0.1
    scales = BlockScale(_stored(tmp_path, scale, "scale"), block, torch.bfloat16)
    stored = replace(_stored(tmp_path, full), scale=scales)
    spread = scale
    if block:
        spread = scale.repeat_interleave(block[0], 0)[:50].repeat_interleave(block[1], 1)[:, :33]
    plain = (full.float() * spread).to(torch.bfloat16)
    _check(logical_blocks(rules.QKV_IN_ONE, [stored], HEADS), _grouped(*plain.split([30, 10, 10])))


def test_a_pickled_tensor_may_lie_in_any_order() -> None:
    held = torch.randn(9, 14).t()
    _check([whole(StoredMatrix("t", lambda: held, 0, held.dtype, 14, 9))], held)


def test_only_the_rows_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, ranges = torch.randn(100, 16), []
    stored, read = _stored(tmp_path, full), ReadOnlyFile.read

    def watched(file: ReadOnlyFile, start: int, target: memoryview) -> None:
        ranges.append((start, len(target)))
        read(file, start, target)

    monkeypatch.setattr(ReadOnlyFile, "read", watched)
    fill(torch.empty(7, 16), [whole(stored)], (40, 0))
    assert ranges == [(13 + 40 * 64, 7 * 64)]  # at once, with nothing between
    ranges.clear()
    fill(torch.empty(7, 3), [whole(stored)], (40, 5))
    assert min(start for start, _ in ranges) == 13 + 40 * 64 and sum(size for _, size in ranges) == 7 * 64


def test_boxes_that_do_not_make_up_a_matrix() -> None:
    assert wrong_cover([(0, 0, 2, 4), (2, 0, 3, 2), (2, 2, 3, 4)], 3, 4) is None
    assert wrong_cover([(0, 0, 2, 4)], 3, 4) == "only 8 of its 12 numbers are stored"
    assert wrong_cover([(0, 0, 2, 4), (1, 3, 3, 4), (2, 0, 3, 3)], 3, 4) == "row 1 is stored twice"
    assert wrong_cover([(0, 0, 3, 5)], 3, 4) == "rows 0 to 3 and columns 0 to 5 are outside its shape [3, 4]"
    assert wrong_cover([], 0, 4) is None
    with pytest.raises(ValueError, match="0 of the 4 numbers"):
        fill(torch.empty(2, 2), [])


def test_a_file_that_fails_is_named_with_the_tensor(tmp_path: Path) -> None:
    stored = _stored(tmp_path, torch.randn(50, 10))
    os.truncate(tmp_path / "t", 500)
    with pytest.raises(
        ConfigError, match=rf"^tensor t: {tmp_path / 't'} cannot be read: it was cut from \d+ to 500 bytes "
    ):
        fill(torch.empty(50, 10), [whole(stored)])


# ---------------------------------------------------------------------------------------------------------------------
# Headers
# ---------------------------------------------------------------------------------------------------------------------


def _file(header: str, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + body


def _tensor(begin: int, end: int, dtype: str = "F32", shape: str = "[1]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def _wrong_range(name: str, found: str, expected: str) -> str:
    reason = f"but its shape and the tensors before it call for {expected}"
    return f"its header gives tensor {name} data_offsets {found}, {reason}"


WRONG_HEADERS = {
    "short": (b"\x05\x00", "does not start with a safetensors header"),
    "long": (struct.pack("<Q", 10**9) + b"{}", "does not start with a safetensors header"),
    "no_json": (_file("{"), "JSONDecodeError"),
    "a_list": (_file("[]"), "not a valid safetensors header"),
    "twice": (_file(f'{{"a":{_tensor(0, 4)},"a":{_tensor(0, 4)}}}', bytes(4)), "the key a appears twice"),
    "type": (_file(f'{{"a":{_tensor(0, 4, "F31")}}}', bytes(4)), "tensor a has type F31, which is none of "),
    "negative": (_file(f'{{"a":{_tensor(0, 4, shape="[-1]")}}}', bytes(4)), "shape [-1]"),
    "text": (_file('{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}', bytes(4)), "shape ['1']"),
    "size": (_file(f'{{"a":{_tensor(0, 8)}}}', bytes(8)), _wrong_range("a", "[0, 8]", "[0, 4]")),
    "gap": (_file(f'{{"a":{_tensor(4, 8)}}}', bytes(8)), _wrong_range("a", "[4, 8]", "[0, 4]")),
    "overlap": (
        _file(f'{{"a":{_tensor(0, 4)},"b":{_tensor(2, 6)}}}', bytes(6)),
        _wrong_range("b", "[2, 6]", "[4, 8]"),
    ),
    "cut": (_file(f'{{"a":{_tensor(0, 4)}}}', bytes(3)), "bytes, but its header describes"),
    "more": (_file(f'{{"a":{_tensor(0, 4)}}}', bytes(5)), "bytes, but its header describes"),
    "metadata": (_file('{"__metadata__":{"a":1}}'), "__metadata__"),
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_wrong_headers_are_refused_in_words(name: str, tmp_path: Path) -> None:
    content, says = WRONG_HEADERS[name]
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_header(tmp_path / "file")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_header_says_where_bytes_lie(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3, dtype=torch.bfloat16), "c": torch.zeros(0)}
    (tmp_path / "file").write_bytes(save(tensors, {"format": "pt", "note": "kept"}))
    unpadded = _file(f'{{"a":{_tensor(0, 24, shape="[2,3]")}}} ', tensors["a"].numpy().tobytes())
    (tmp_path / "old").write_bytes(unpadded)
    assert read_header(tmp_path / "file").metadata == {"format": "pt", "note": "kept"}
    for name, names in (("file", "abc"), ("old", "a")):
        header, content = read_header(tmp_path / name), (tmp_path / name).read_bytes()
        assert set(header.tensors) == set(names)
        for key, span in header.tensors.items():
            expected = tensors[key].view(-1).view(torch.uint8).numpy().tobytes()
            assert content[span.start : span.start + span.num_bytes] == expected and span.shape == tensors[key].shape
    assert read_header(tmp_path / "old").tensors["a"].start % 4 != 0


# ---------------------------------------------------------------------------------------------------------------------
# The stream that writes
# ---------------------------------------------------------------------------------------------------------------------


def test_a_stream_is_what_safetensors_writes_at_once(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5, dtype=torch.bfloat16),
        "a": torch.randn(5, 3).t(),
        "d": torch.randint(9, (7,)),
        "c": torch.zeros(0, 4),
        "\u00e4": torch.ones(1, dtype=torch.uint8),
    }
    write_tensors(tmp_path / "ours", tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_files_are_planned_in_front_and_written_in_any_order(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(number + 1, 5) for number in range(6)}
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    writer = Writer(tmp_path, specs, max_file_bytes=100)
    for name in reversed(tensors):
        writer.add(name, tensors[name])
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names_by_file = [sorted(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert names_by_file == [
        ["t0", "t1"],
        ["t2"],
        ["t3"],
        ["t4"],
        ["t5"],
    ]  # the last two are larger than max_file_bytes
    for path in tmp_path.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, tensors[name]) and index["weight_map"].pop(name) == path.name
    assert not index["weight_map"]


def test_what_was_promised_must_come(tmp_path: Path) -> None:
    spec = TensorSpec("a", torch.float32, (2,))
    with pytest.raises(AssertionError, match="tensor a was announced"):
        Writer(tmp_path, [spec]).close()
    with pytest.raises(AssertionError, match="another dtype or shape than announced"):
        Writer(tmp_path, [spec]).add("a", torch.zeros(3))
    with pytest.raises(AssertionError, match="one name"):
        Writer(tmp_path, [spec, spec])


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_full_disk_is_one_line_that_names_the_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = Writer(tmp_path / "out.partial-0", [TensorSpec("a", torch.float32, (2,))])
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError) as error:
        writer.add("a", torch.zeros(2))
    file = tmp_path / "out" / "model.safetensors"
    assert str(error.value).startswith(f"{file} cannot be written: No space left on device. Free some space")
