"""A file of recorded routing: the experts that each token chose, in each MoE layer, while a model generated text.

The first line is a header: `{"format": "mixtrain routing 1", "model": NAME, "num_experts": E, "top_k": K, "layers":
[numbers of the MoE layers, in the order in which they run], "num_tokens": null}`. The number of tokens is null, because
it is unknown at the start. Then follows one line for each layer of each pass. A pass is the forward pass of the
prompts, or of one more token for every prompt:

`{"pass": 7, "layer": 2, "tokens": [[0, 31], [1, 18]], "experts": [[3, 9], [9, 4]]}`

A token is given by the index of its prompt and its position in the text; `experts` has the token's experts, in the
router's order. Pass numbers increase, and each pass has all layers in the header's order. The lines of a pass are
written together, so the file of a killed run ends with a complete pass, or with an incomplete line, which the reader
ignores. A file may be compressed with gzip.
"""

from __future__ import annotations

import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from base.files import WriteError, writing

FORMAT = "mixtrain routing 1"
FLAG = "--record-routing"
AGAIN = "Record the routing again."
_GZIP = b"\x1f\x8b"
_KEYS = ("pass", "layer", "tokens", "experts")


@dataclass(frozen=True)
class RoutingHeader:
    """The model of a recording. `layers`: numbers of the MoE layers, in the order in which a pass runs them."""

    model: str
    num_experts: int
    top_k: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class RoutedLayer:
    """The routing of one MoE layer in one pass: tokens as (prompt, position), and the experts that each token chose."""

    pass_number: int
    layer: int
    tokens: tuple[tuple[int, int], ...]
    experts: tuple[tuple[int, ...], ...]

    @cached_property
    def counts(self) -> dict[int, int]:
        """Number of tokens of each chosen expert, as a dict sorted by expert."""
        return dict(sorted(Counter(chain.from_iterable(self.experts)).items()))


@dataclass(frozen=True)
class Recording:
    """The recorded routing of a generation: the layers of all passes, in the order in which they ran."""

    header: RoutingHeader
    visits: list[RoutedLayer] = field(default_factory=list)


class RoutingWriter(AbstractContextManager["RoutingWriter"]):
    """Context manager that writes recorded routing pass by pass, and on exit the last pass.

    Raises ConfigError if the file exists or cannot be created. A later disk error is printed on standard error, and
    ends only the recording.
    """

    def __init__(self, path: Path, header: RoutingHeader) -> None:
        self._path, self._pass, self._current = path, -1, -1
        self._lines: list[str] = []
        try:
            self._file: io.FileIO | None = io.FileIO(path, "x")
        except FileExistsError:
            raise ConfigError(f"{FLAG} ({path}) must be a new file, but this file exists. Give another name.") from None
        except OSError as error:
            raise ConfigError(f"{FLAG} ({path}) cannot be created: {error.strerror}. Correct its path.") from None
        self._lines.append(json.dumps({"format": FORMAT, **vars(header), "num_tokens": None}))
        self._flush()

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_pass(self) -> None:
        """Begin the next forward pass: calls of `add` for its MoE layers follow."""
        self._current += 1

    def add(self, layer: int, tokens: list[tuple[int, int]], experts: list[list[int]]) -> None:
        """Add the routing of one layer in the pass that was begun last, as `write` does."""
        self.write(self._current, layer, tokens, experts)

    def write(
        self, pass_number: int, layer: int, tokens: Iterable[Sequence[int]], experts: Iterable[Sequence[int]]
    ) -> None:
        """Record the experts that each token chose in one layer in one pass; a token is given as (prompt, position).
        The first record of a new pass writes those of the previous pass to the file."""
        if pass_number != self._pass:
            assert pass_number > self._pass, "passes count up"
            self._flush()
            self._pass = pass_number
        positions, choices = [list(token) for token in tokens], [list(choice) for choice in experts]
        assert len(positions) == len(choices), "each token has a choice"
        line = {"pass": pass_number, "layer": layer, "tokens": positions, "experts": choices}
        self._lines.append(json.dumps(line, separators=(",", ":")))

    def close(self) -> None:
        """Write the recorded routing of the last pass to the file, and close the file. A second call does nothing."""
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._file is None or not lines:
            return
        data = memoryview("".join(line + "\n" for line in lines).encode())
        try:
            with writing(self._path):
                while data:
                    data = data[self._file.write(data) or 0 :]
        except WriteError as error:
            print(f"{FLAG}: {error} The recording ends here.", file=sys.stderr, flush=True)
            self._file.close()
            self._file = None


def read_routing(path: Path, log: Callable[[str], None] | None = None) -> Recording:
    """Read recorded routing from a file, which may be compressed.

    An incomplete last line and an incomplete last pass are ignored, with a message to `log` (None: standard error).
    Raises ConfigError, with file and line, for anything else that is not recorded routing.
    """
    log = log or (lambda text: print(text, file=sys.stderr, flush=True))
    data, is_cut = _content(path)
    lines = data.split(b"\n")
    rest = lines.pop()  # after the last line end: empty, or a line without its end
    if rest and lines and not _is_json(rest):
        is_cut = True
    elif rest or not lines:
        lines.append(rest)
    header = _header(path, lines[0])
    visits: list[RoutedLayer] = []
    for number, line in enumerate(lines[1:], start=2):
        visits.append(_visit(f"{path}:{number}", line, header, visits[-1] if visits else None))
    if is_cut:
        log(f"note: {path}:{len(lines) + 1} is an incomplete line and was ignored; its writer was killed")
    while visits and visits[-1].layer != header.layers[-1]:
        is_whole_pass_before = visits[-1].layer == header.layers[0]
        dropped = visits.pop()
        if is_whole_pass_before:
            log(f"note: {path}: the last pass ({dropped.pass_number}) lacks layers and was ignored")
    return Recording(header, visits)


def _content(path: Path) -> tuple[bytes, bool]:
    """Return the decompressed bytes of a file, and whether compressed data end too early."""
    data = path.read_bytes()
    if not data.startswith(_GZIP):
        return data, False
    streams: list[bytes] = []
    try:
        while data:
            stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            streams.append(stream.decompress(data))
            if not stream.eof:
                return b"".join(streams), True
            data = stream.unused_data
    except zlib.error as error:
        line = 1 + sum(each.count(b"\n") for each in streams)
        raise ConfigError(f"{path}:{line} cannot be decompressed: {error}. {AGAIN}") from None
    return b"".join(streams), False


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _header(path: Path, line: bytes) -> RoutingHeader:
    try:
        fields = json.loads(line)
        if fields["format"] == FORMAT and isinstance(fields["model"], str):
            header = RoutingHeader(fields["model"], fields["num_experts"], fields["top_k"], tuple(fields["layers"]))
            whole = all(_is_count(value) for value in (*header.layers, header.num_experts, header.top_k))
            if whole and 0 < header.top_k <= header.num_experts and len(set(header.layers)) == len(header.layers) > 0:
                return header
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ConfigError(f"{path}:1 must be a header of recorded routing, as {FLAG} writes it. {AGAIN}")


def _visit(where: str, line: bytes, header: RoutingHeader, before: RoutedLayer | None) -> RoutedLayer:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is damaged: it must be JSON. {AGAIN}") from None
    if not isinstance(fields, dict) or not all(name in fields for name in _KEYS):
        raise ConfigError(f"{where} is damaged: it must be an object with {', '.join(_KEYS)}. {AGAIN}")
    number, layer, tokens, experts = (fields[name] for name in _KEYS)
    for name, value in (("pass", number), ("layer", layer)):
        if not _is_count(value):
            raise ConfigError(f"{where} has {name} {value!r}: it must be an integer of at least 0. {AGAIN}")
    _check_order(where, number, layer, header, before)
    if not (_is_table(tokens) and _is_table(experts) and len(tokens) == len(experts) > 0):
        raise ConfigError(
            f"{where}: tokens and experts must be two lists of equal length, at least 1, of lists of integers. {AGAIN}"
        )
    if wrong := [token for token in tokens if len(token) != 2]:
        raise ConfigError(f"{where} has token {wrong[0]}: it must be a pair of integers, prompt and position. {AGAIN}")
    for choice in experts:
        if len(choice) != header.top_k or len(set(choice)) != len(choice):
            raise ConfigError(f"{where} has the choice {choice}: it must be {header.top_k} different experts. {AGAIN}")
        if max(choice) >= header.num_experts:
            raise ConfigError(
                f"{where} has expert {max(choice)}, but the header declares experts 0 to {header.num_experts - 1}. "
                f"{AGAIN}"
            )
    return RoutedLayer(number, layer, tuple((row, at) for row, at in tokens), tuple(map(tuple, experts)))


def _check_order(where: str, number: int, layer: int, header: RoutingHeader, before: RoutedLayer | None) -> None:
    """Raise ConfigError if a line with this layer and pass cannot follow the previous line."""
    if before is None or before.layer == header.layers[-1]:
        follows, first = header.layers[0], (0 if before is None else before.pass_number + 1)
        right = layer == follows and number >= first
        rule = f"layer {follows} of pass {first} or later"
    else:
        follows = header.layers[header.layers.index(before.layer) + 1]
        right = layer == follows and number == before.pass_number
        rule = f"layer {follows} of pass {before.pass_number}"
    if not right:
        raise ConfigError(f"{where} has layer {layer} of pass {number}, but must have {rule}. {AGAIN}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) and row and all(map(_is_count, row)) for row in value)
