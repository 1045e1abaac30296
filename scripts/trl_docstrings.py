# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
Griffe extension: docstrings in TRL's dialect, rewritten to what mkdocstrings' Google style reads.

- ``name (`type`, *optional*, defaults to `x`):`` becomes ``name (type):`` with "Optional, defaults to `x`." at the end
  of the description, several names at once become one entry each;
- ``> Parameters that control ...`` between arguments becomes part of the next entry;
- backticks around the types of `Returns:` and `Raises:` go away;
- ``[`ClipRange`]`` becomes a link to this reference, ``[`~trl.GRPOConfig`]`` one to the Hugging Face documentation.
"""

import re
import textwrap

import griffe


_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
_ENTRY = re.compile(r"^(?P<names>[*\w][\w, *]*?) \((?P<type>.+?)\):(?P<text>.*)$")
_GROUP = re.compile(r"^> (?P<title>.+)$")
_LINK = re.compile(r"\[`(?P<tilde>~?)(?P<target>[\w.]+)`\](?![(\[])")
_NAME = re.compile(r"\[?`~?([^`]+)`\]?")
_TRAITS = re.compile(r", \*optional\*(?:, defaults to (?P<default>`.+?`|.+))?$")

# Where Hugging Face documents the classes that our docstrings name.
HUGGING_FACE = {
    "trl.GRPOConfig": "https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig",
    "trl.GRPOTrainer": "https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOTrainer",
    "transformers.PreTrainedModel": (
        "https://huggingface.co/docs/transformers/main_classes/model#transformers.PreTrainedModel"
    ),
    "transformers.PreTrainedTokenizerFast": (
        "https://huggingface.co/docs/transformers/main_classes/tokenizer#transformers.PreTrainedTokenizerFast"
    ),
    "peft.PeftModel": "https://huggingface.co/docs/peft/package_reference/peft_model#peft.PeftModel",
    "datasets.Dataset": "https://huggingface.co/docs/datasets/package_reference/main_classes#datasets.Dataset",
}


def convert_links(text: str, addresses: dict[str, str]) -> str:
    """
    Links in Hugging Face's syntax as Markdown.

    Args:
        text (`str`): Docstring.
        addresses (`dict[str, str]`): Full name of each of our own public objects, by its last part.
    """

    def link(match: re.Match) -> str:
        target = match["target"]
        shown = target.rpartition(".")[2] if match["tilde"] else target
        if target in HUGGING_FACE:
            return f"[`{shown}`]({HUGGING_FACE[target]})"
        if target in addresses:
            return f"[`{shown}`][{addresses[target]}]"
        return f"`{shown}`"

    return _LINK.sub(link, text)


def convert_sections(text: str, *, show_defaults: bool = True) -> str:
    """
    Sections of arguments, attributes, return values and exceptions in Google style; other text as it is.

    Args:
        text (`str`): Docstring.
        show_defaults (`bool`): Whether defaults are kept. A function's stand in its signature.
    """
    lines = text.split("\n")
    out: list[str] = []
    i = 0
    while i < len(lines):
        section = _SECTION.match(lines[i])
        out.append(lines[i])
        i += 1
        if not section:
            continue
        body: list[str] = []
        while i < len(lines) and (not lines[i].strip() or lines[i].startswith(" ")):
            body.append(lines[i])
            i += 1
        trailing = len(body) - len("\n".join(body).rstrip().split("\n"))
        body = textwrap.dedent("\n".join(body[: len(body) - trailing])).split("\n")
        while body and not body[0]:
            body.pop(0)
        converted = _plain_types(body) if section[1] in ("Returns", "Raises") else _entries(body, show_defaults)
        out += [f"    {line}" if line else "" for line in converted]
        out += [""] * trailing
    return "\n".join(out)


def _plain_types(lines: list[str]) -> list[str]:
    """Types before the first colon of an entry without backticks and links."""
    return [re.sub(r"^\[?`~?([^`]+)`\]?(?: or \[?`~?([^`]+)`\]?)?(?=:|$)", _joined, line) for line in lines]


def _joined(match: re.Match) -> str:
    return " | ".join(part for part in match.groups() if part) + ("" if match.string[match.end() :] else ":")


def _entries(lines: list[str], show_defaults: bool) -> list[str]:
    out: list[str] = []
    title = tail = ""

    def close() -> None:
        nonlocal tail
        if tail:
            while out and not out[-1]:
                out.pop()
            out[-1] += f" {tail}"
            tail = ""

    for line in lines:
        if group := _GROUP.match(line):
            close()
            title = group["title"].removeprefix("Parameters that control ").rstrip(".")
            continue
        entry = _ENTRY.match(line)
        if not entry:
            if line or out:  # a section must not begin with an empty line
                out.append(line)
            continue
        close()
        kind = entry["type"]
        traits = _TRAITS.search(kind)
        if traits:
            kind = kind[: traits.start()]
            tail = f"Defaults to {traits['default']}." if traits["default"] and show_defaults else ""
        kind = _NAME.sub(r"\1", kind).replace(" or ", " | ")
        names = entry["names"].split(", ")
        text = entry["text"].strip()
        heading = f"**{title[0].upper()}{title[1:]}.**" if title else ""
        title = ""
        for name in names[:-1]:
            out.append(f"{name} ({kind}): As the next one.")
        out.append(f"{names[-1]} ({kind}): {' '.join(filter(None, [heading, text]))}".rstrip())
    close()
    return out


class TRLDocstrings(griffe.Extension):
    """Rewrites every docstring of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        """Called by griffe with the whole package."""
        self._walk(pkg, {str(name): f"{pkg.path}.{name}" for name in pkg.exports or []})

    def _walk(self, obj: griffe.Object, addresses: dict[str, str]) -> None:
        if obj.is_class:
            # The docstring gives the defaults. Those of the fields would stand beside them, and a `None` there can
            # mean a default that is worked out later.
            obj.decorators = []
        if obj.docstring is not None:
            text = convert_sections(obj.docstring.value, show_defaults=not obj.is_function)
            obj.docstring.value = convert_links(text, addresses)
        for member in obj.members.values():
            if not member.is_alias:
                self._walk(member, addresses)
