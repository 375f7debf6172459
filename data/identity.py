"""The identity of a run's data: digests of its content, which checkpoints store and the next start compares.

An identity is JSON:

    {"tokenizer": digest,
     "split": {"rule": ..., "fraction": ...}, "sources": [source, ...],
     "validation": {name: [source, ...], ...} if there are validation corpora}

    source: {"name": as in data.corpus, "weight": float or null, "documents": int,
             "train": {"tokens": int, "digest": ...}, "valid": likewise,
             "files": {"bin": digest, "idx": digest} of the user's token files, else null,
             "python": the version of the standard library if it is the source, else null,
             "text": digest of the documents' text, independent of tokens and split, else null,
             "documents_in_text": the rule for its text files, null if it has none (data/corpus/text.py)}

It contains neither paths nor times, so a corpus keeps its identity when it is moved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from data.digest import digest_of

Identity = dict[str, Any]


class Difference(NamedTuple):
    """A difference between a run's current data and the data that it was trained on: the configuration key, and a
    clause that describes the difference."""

    key: str
    text: str


def differences(now: Identity, trained: Identity) -> list[Difference]:
    """Return the differences between the data of this start (`now`) and the data that the run was trained on."""
    found, comparable = _of_training(now, trained), now["tokenizer"] == trained["tokenizer"]
    # Only validation corpora that both have: added and removed ones do not affect training.
    for name, sources in now.get("validation", {}).items():
        old_sources = trained.get("validation", {}).get(name)
        if old_sources is None:
            continue
        problem = next(filter(None, (_other_content(*both, comparable) for both in zip(sources, old_sources))), None)
        if len(sources) != len(old_sources):
            problem = f"has {len(sources)} sources, but the run was validated on {len(old_sources)}"
        if problem:
            text = problem.replace("the run was trained on", "the run was validated on").replace("(training: ", "(")
            found.append(Difference("data.validation_corpora", f"data.validation_corpora: {name}: {text}"))
    return found


def facts(identity: Identity) -> dict[str, str]:
    """Return, for each data key of the configuration, a short digest of the content to which the key refers."""
    contents = {
        "data.tokenizer": identity["tokenizer"],
        "data.corpus": identity["sources"],
        "data.validation_fraction": identity.get("split"),
        "data.validation_corpora": identity.get("validation"),
    }
    return {key: f"content {digest_of(content)[:12]}" for key, content in contents.items()}


def _of_training(now: Identity, trained: Identity) -> list[Difference]:
    found = []
    if now["tokenizer"] != trained["tokenizer"]:
        found.append(Difference("data.tokenizer", "data.tokenizer is not the tokenizer that the run was trained with"))
    split, old_split = now["split"], trained["split"]
    if split["fraction"] != old_split["fraction"]:
        text = f"data.validation_fraction is {split['fraction']}, but the run was trained with {old_split['fraction']}"
        found.append(Difference("data.validation_fraction", text))
    elif split["rule"] != old_split["rule"]:
        text = f"validation documents are chosen by rule {split['rule']!r}, but the run used rule {old_split['rule']!r}"
        found.append(Difference("data.validation_fraction", text))
    sources, old_sources = now["sources"], trained["sources"]
    if len(sources) != len(old_sources):
        text = f"data.corpus has the sources {_names(sources)}, but the run was trained on {_names(old_sources)}"
        return [*found, Difference("data.corpus", text)]
    contents, old_contents = ([source["train"]["digest"] for source in some] for some in (sources, old_sources))
    if contents != old_contents and sorted(contents) == sorted(old_contents):
        text = (
            f"data.corpus has the sources in the order {_names(sources)}, but the run was trained with the order "
            f"{_names(old_sources)}"
        )
        return [*found, Difference("data.corpus", text)]
    # With another tokenizer or fraction all digests differ: only the numbers of documents can be compared.
    comparable = not found
    for source, old in zip(sources, old_sources, strict=True):
        name = source["name"]
        if source["weight"] != old["weight"]:
            weights = ["by size" if each["weight"] is None else str(each["weight"]) for each in (source, old)]
            text = f"data.corpus: the weight of {name} is {weights[0]}, but the run was trained with {weights[1]}"
            found.append(Difference("data.corpus", text))
        rule, old_rule = source["documents_in_text"], old["documents_in_text"]
        if rule != old_rule and None not in (rule, old_rule):
            text = f"data.documents_in_text is {rule}, but the run was trained on {name} with {old_rule}"
            found.append(Difference("data.documents_in_text", text))
            continue
        problem = _other_content(source, old, comparable)
        if problem:
            found.append(Difference("data.corpus", f"data.corpus: {problem}"))
    return found


def _other_content(source: dict[str, Any], old: dict[str, Any], comparable: bool) -> str | None:
    """Return a clause about how a source's content differs from the training data; None if both are equal."""
    name, files, old_files = source["name"], source["files"], old["files"]
    if files and old_files:
        changed = [suffix for suffix in ("bin", "idx") if files[suffix] != old_files[suffix]]
        if changed:
            base = name.removesuffix(".bin").removesuffix(".idx")
            words = " and ".join(f"{base}.{suffix}" for suffix in changed)
            return f"the content of {words} is not what the run was trained on"
    same_count = source["documents"] == old["documents"]
    changed = [split for split in ("train", "valid") if source[split] != old[split]]
    other_text = bool(source["text"] and old["text"]) and source["text"] != old["text"]
    if same_count and not other_text and not (changed and comparable):
        return None
    if source["python"] and old["python"] and source["python"] != old["python"]:
        return f"stdlib is that of Python {source['python']}, but the run was trained on that of {old['python']}"
    called = name if name == old["name"] else f"{name} (was {old['name']})"
    if not same_count:
        return f"{called} has {source['documents']:,} documents, but the run was trained on {old['documents']:,}"
    name_of = {"train": "training", "valid": "validation"}
    tokens = [f"{name_of[key]}: {source[key]['tokens']:,} tokens, before {old[key]['tokens']:,}" for key in changed]
    shown = f" ({'; '.join(tokens)})" if comparable else ""
    return f"the text of {called} is not what the run was trained on{shown}"


def _names(sources: list[dict[str, Any]]) -> str:
    return "[" + ", ".join(source["name"] for source in sources) + "]"
