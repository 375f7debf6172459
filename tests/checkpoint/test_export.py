"""What leaves a run: the files of an exported folder, all of them or none, and the same text from the same prompt in
transformers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from checkpoint import export
from configs.tokenizer_files import copy_tokenizer
from data.tokenizer import load_tokenizer
from inference import generate
from models import convert
from tests import distributed
from tests.models.helpers import write_tensors
from tests.models.test_huggingface import FAMILIES
from tests.training.helpers import train_on_ranks
from tests.training.test_old_runs import unpack

WORDS = [
    "the",
    "model",
    "learns",
    "a",
    "gradient",
    "from",
    "text",
    "def",
    "return",
    "self",
    "import",
    "class",
    "(",
    ")",
    ":",
    "=",
    ".",
]
TEXTS = [" ".join(WORDS[(i * k) % len(WORDS)] for i in range(12)) for k in range(1, 17)]
OF_A_MODEL = {  # what a Hugging Face model's folder holds beside its tokenizer
    "config.json": json.dumps({"model_type": "gpt2", "n_layer": 1}),
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}),
    "generation_config.json": json.dumps({"eos_token_id": 7}),
    "pytorch_model.bin": "weights",
    "preprocessor_config.json": "{}",
    "README.txt": "words",
}


def byte_level(path: Path, bos: bool) -> Path:
    """A Hugging Face folder with a byte-level BPE of about 300 tokens, and with all that lies beside it in a model's
    folder."""
    path.mkdir(parents=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<|begin|>", "<|end|>", "<|pad|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["gradient descent"])  # an added token that is none of the special ones
    if bos:
        begin = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", begin)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**roles, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (path / "special_tokens_map.json").write_text(json.dumps(roles))
    for name, text in OF_A_MODEL.items():
        (path / name).write_text(text)
    return path


TINY = [
    "model=gpt_tiny",
    "model.num_layers=2",
    "model.sequence_length=32",
    "model.hidden_size=32",
    "model.init_std=0.2",
]


@pytest.fixture(scope="module")
def run_dir(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokenizer came from a Hugging Face model's folder, and puts a token before each text."""
    path = tmp_path_factory.mktemp("run")
    tokenizer = byte_level(path / "tokenizer", bos=True)
    train_on_ranks([*TINY, *data, f"data.tokenizer={tokenizer}", f"run_dir={path / 'run'}", "training.steps=2"])
    return path / "run"


def test_only_tokenizer_files_are_kept(tmp_path: Path) -> None:
    whole = byte_level(tmp_path / "whole", bos=False)
    for name in ("chat_template.jinja", "vocab.json", "tokenizer.model"):
        (whole / name).write_text("x")
    whole.chmod(0o700)
    copy_tokenizer(whole, tmp_path / "copy")
    kept = {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "vocab.json",
        "tokenizer.model",
    }
    assert {path.name for path in (tmp_path / "copy").iterdir()} == kept
    copy_tokenizer(tmp_path / "copy", tmp_path / "copy")  # onto itself
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    # A file alone: what says how it is used comes along, other vocabularies do not.
    copy_tokenizer(whole / "tokenizer.model", tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == kept - {"tokenizer.json", "vocab.json"}
    (whole / "tokenizer.json").rename(whole / "mine.json")
    copy_tokenizer(whole / "mine.json", tmp_path / "mine")
    assert (tmp_path / "mine" / "tokenizer.json").read_bytes() == (whole / "mine.json").read_bytes()


def _export(run_dir: Path, target: Path) -> int:
    os.umask(0o027)
    try:
        assert export.main([str(run_dir), str(target / "weights")]) == 0
        return convert.main(["export", str(target / "weights"), str(target / "hf"), "--max-shard-size", "40kB"])
    finally:
        os.umask(0o022)


def test_an_export_holds_its_own_files_alone(run_dir: Path, tmp_path: Path) -> None:
    assert distributed.run(_export, 1, run_dir, tmp_path) == [0]
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in (run_dir / "tokenizer").iterdir()} == tokenizer
    ours = {"config.yaml", "model.safetensors", "checksums.json"}
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {*tokenizer, *ours}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert all((tmp_path / "hf" / shard).is_file() for shard in index["weight_map"].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "weights"]
    for path in [
        tmp_path / "hf",
        tmp_path / "weights",
        *(tmp_path / "hf").iterdir(),
        *(tmp_path / "weights").iterdir(),
    ]:
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def _interrupted(run_dir: Path, target: Path, module: str, function: str, error: type[BaseException]) -> list[str]:
    """The names beside `target` while an export does `function`, which fails; afterwards nothing of it may be left."""
    seen: list[str] = []

    def fail(*_: Any) -> None:
        seen.extend(path.name for path in target.parent.iterdir())
        raise error("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.{function}", fail)
        with pytest.raises(error):
            export.export(run_dir, target)
    return seen


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("models.folder.write_config", OSError),
        ("models.folder.write_config", KeyboardInterrupt),
        ("shutil.copyfile", OSError),
    ],
)
def test_an_export_is_whole_or_not_there(
    function: str, error: type[BaseException], run_dir: Path, tmp_path: Path
) -> None:
    others = {"out.partial", "out.partial-0"}  # of the user, or of another process
    for other in others:
        (tmp_path / other).mkdir()
        (tmp_path / other / "file").write_text("x")
    seen = distributed.run(_interrupted, 1, run_dir, tmp_path / "out", *function.rsplit(".", 1), error)[0]
    assert "out" not in seen and others < set(seen)
    assert {path.name for path in tmp_path.iterdir()} == others
    assert all((tmp_path / other / "file").exists() for other in others)


def test_a_file_of_weights_takes_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_tensors(tmp_path, {"weight": torch.zeros(3)})
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode


# ---------------------------------------------------------------------------------------------------------------------
# The same text from the same prompt
# ---------------------------------------------------------------------------------------------------------------------

PROMPTS = ["the model learns", "def return (", "a gradient descent <|end|> from", "  text <|begin|>\n."]
NUM_TOKENS = 10
GPT_FAMILIES = ("gpt2", "llama", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3")


def _note(source: Path) -> str:
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        assert (
            generate.main(
                ["--checkpoint", str(source), "--device", "cpu", "--ids", "--prompt", "5 6", "--max-tokens", "1"]
            )
            == 0
        )
    return err.getvalue()


def texts(source: Path, prompts: Sequence[str] = PROMPTS) -> list[tuple[str, bool, list[int]]]:
    """What `inference.generate` makes of each prompt: the text, whether it ended, the prompt's tokens."""
    arguments = ["--checkpoint", str(source), "--device", "cpu", "--json", "--max-tokens", str(NUM_TOKENS)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert generate.main([*arguments, *(word for prompt in prompts for word in ("--prompt", prompt))]) == 0
    return [
        (line["text"], line["stopped"], line["prompt_tokens"]) for line in map(json.loads, out.getvalue().splitlines())
    ]


def their_texts(source: Path, prompts: Sequence[str] = PROMPTS) -> list[tuple[str, bool, list[int]]]:
    """What transformers makes of each prompt with nothing but what lies in the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    found = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        length = inputs.input_ids.shape[1]
        new = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS)[0, length:].tolist()
        ends = model.generation_config.eos_token_id
        stopped = bool(new) and new[-1] in (ends if isinstance(ends, list) else [ends])
        found.append((tokenizer.decode(new, skip_special_tokens=True), stopped, inputs.input_ids[0].tolist()))
    return found


def _hugging_face_folder(name: str, path: Path) -> None:
    """A random model of a family with a text tokenizer, whose end token comes up while it writes."""
    import transformers

    index = GPT_FAMILIES.index(name)
    byte_level(path, bos=index % 2 == 1)
    class_name, values = FAMILIES[name]
    length = "n_positions" if "n_positions" in values else "max_position_embeddings"
    model_class = getattr(transformers, class_name)
    torch.manual_seed(3)
    begin, end, pad = 1, 2, 3
    config = model_class.config_class(
        **{**values, "vocab_size": 303, length: 64, "bos_token_id": begin, "eos_token_id": end}
    )
    config.pad_token_id = pad
    model = model_class(config).eval()
    for name_of_index in ("model.safetensors.index.json", "generation_config.json"):
        (path / name_of_index).unlink()
    model.save_pretrained(path)
    # The token that the model takes third of the first prompt becomes another name of the end.
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    new = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None)[
        0, inputs.input_ids.shape[1] :
    ].tolist()
    settings = json.loads((path / "generation_config.json").read_text())
    if index % 3 == 0:  # config.json alone says it
        (path / "generation_config.json").unlink()
        settings = json.loads((path / "config.json").read_text())
    target = path / ("config.json" if index % 3 == 0 else "generation_config.json")
    target.write_text(json.dumps({**settings, "eos_token_id": new[2] if index % 2 else [end, new[2]]}))


@pytest.mark.parametrize("name", GPT_FAMILIES)
def test_there_and_back_with_the_same_text(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _hugging_face_folder(name, tmp_path / "hf")
    expected = their_texts(tmp_path / "hf")
    assert any(stopped for _, stopped, _ in expected)
    assert convert.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert convert.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    said = capfd.readouterr().err
    for made in ("ours", "back"):  # a line at the start and one at the end
        assert re.findall(rf"^writing {made}: (\S+B) of", said, re.M)[0] == "0.00B"
        assert len(re.findall(rf"^writing {made}: ", said, re.M)) == 2
    assert their_texts(tmp_path / "back") == expected
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "back"))
    length = "n_positions" if name == "gpt2" else "max_position_embeddings"
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", length):
        assert after[key] == before[key], key
    for source in ("hf", "ours", "back") if name == "llama" else ("back",):
        assert distributed.run(texts, 1, tmp_path / source)[0] == expected


def test_a_run_leaves_with_the_same_text(run_dir: Path, tmp_path: Path) -> None:
    distributed.run(_export, 1, run_dir, tmp_path)
    expected = their_texts(tmp_path / "hf")
    assert all(prompt[0] == 1 for _, _, prompt in expected)  # the tokenizer's begin token
    for source in (run_dir, tmp_path / "weights", tmp_path / "hf"):
        assert distributed.run(texts, 1, source)[0] == expected
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({**ids, "repetition_penalty": 1.2}))
    assert (
        "note: generation_config.json asks for repetition_penalty (1.2)"
        in distributed.run(_note, 1, tmp_path / "hf")[0]
    )
    for file in ("config.json", "generation_config.json"):
        assert ids.items() <= json.loads((tmp_path / "hf" / file).read_text()).items()


def _fill(source: Path, text: str) -> list[int]:
    from inference.fill_mask import fill_masks, masked_tokens
    from inference.open_model import open_model

    with open_model(source, device="cpu") as model:
        tokens, mask = masked_tokens(model, text)
        return [guess.token for guess in fill_masks(model, [tokens], mask, top_k=5)[0][0]]


def _their_fill(source: Path, text: str) -> list[int]:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model, tokenizer = AutoModelForMaskedLM.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    inputs = tokenizer(text, return_tensors="pt")
    logits = model(**inputs).logits[0, inputs.input_ids[0] == tokenizer.mask_token_id]
    return list(logits[0].topk(5).indices.tolist())


def test_bert_there_and_back(tmp_path: Path) -> None:
    import transformers

    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(word for word in WORDS if word.isalpha()),
        "##s",
        "##ing",
        "learn",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "hf")
    class_name, values = FAMILIES["bert_masked_lm"]
    torch.manual_seed(4)
    config = transformers.BertConfig(**{**values, "vocab_size": 30})
    getattr(transformers, class_name)(config).save_pretrained(tmp_path / "hf")
    assert convert.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert convert.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    text = "the model learning a [MASK] from texts"
    expected = _their_fill(tmp_path / "hf", text)
    assert _their_fill(tmp_path / "back", text) == distributed.run(_fill, 1, tmp_path / "back", text)[0] == expected
    assert json.loads((tmp_path / "back" / "config.json").read_text())["pad_token_id"] == 0
    assert not (tmp_path / "back" / "generation_config.json").exists()


def test_a_bert_leaves_its_run_for_transformers(tmp_path: Path) -> None:
    unpack("bert", tmp_path)
    distributed.run(_export, 1, tmp_path / "bert", tmp_path)
    text = "def [MASK](self):\n    return"
    assert _their_fill(tmp_path / "hf", text) == distributed.run(_fill, 1, tmp_path / "bert", text)[0]


@pytest.mark.parametrize("settings", [None, {"eos_token": "<|end|>", "pad_token": "<|pad|>"}])
def test_a_tokenizer_without_a_class_is_read_as_it_is(settings: dict[str, Any] | None, tmp_path: Path) -> None:
    """A family's own tokenizer class splits texts by rules of its own."""
    from transformers import AutoTokenizer

    folder = byte_level(tmp_path / "tokenizer", bos=True)
    for name in (*OF_A_MODEL, "special_tokens_map.json", "tokenizer_config.json"):
        (folder / name).unlink()
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    else:  # the names that are found without any
        (folder / "tokenizer.json").write_text(
            (folder / "tokenizer.json").read_text().replace("<|end|>", "<|endoftext|>")
        )
    tokenizer = load_tokenizer(folder)
    for name, text in tokenizer.for_transformers("gpt").items():
        (folder / name).write_text(text)
    for family in ("qwen3_moe", "olmoe", "llama"):
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        theirs = AutoTokenizer.from_pretrained(folder)
        for prompt in PROMPTS:
            assert theirs(prompt).input_ids == tokenizer.encode_prompt(prompt), (family, prompt)
        assert theirs.eos_token_id == tokenizer.eod == 2
    assert load_tokenizer(folder).digest == tokenizer.digest
