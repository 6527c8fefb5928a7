"""llms.txt: the pages of the site as a plain list for language models (https://llmstxt.org)."""

import re
from collections.abc import Mapping
from typing import Any

SUMMARY = (
    "slime_tis measures, corrects and explains the mismatch between the log-probs of the rollout"
    " engine and of the training engine, in reinforcement learning of language models."
)


def llms_text(navigation: list[dict[str, Any]], texts: Mapping[str, str]) -> str:
    """Returns the text of llms.txt.

    Args:
        navigation: The `nav` of mkdocs.yml: one dict per section, from its title to its entries.
        texts: Markdown of the pages, by the paths that the navigation has.

    Returns:
        A heading for every section, and a line for every page: its title, a link to its Markdown,
        and its first sentence.

    Raises:
        KeyError: A page of the navigation has no text.
    """
    lines = ["# slime_tis", "", f"> {SUMMARY}"]
    for section in navigation:
        ((heading, entries),) = section.items()
        lines += ["", f"## {heading}", ""]
        for path in _paths(entries):
            text = texts[path]
            lines.append(f"- [{_title(text)}]({path}): {_first_sentence(text)}")
    return "\n".join(lines) + "\n"


def _paths(entry: Any) -> list[str]:
    """Returns the paths of an entry: a path, a dict with a title, or a list of entries."""
    if isinstance(entry, str):
        return [entry]
    entries = entry
    if isinstance(entry, dict):
        entries = entry.values()
    paths = []
    for each in entries:
        paths += _paths(each)
    return paths


def _title(text: str) -> str:
    """Returns the first heading of a page."""
    match = re.search(r"^# (.+)$", text, re.M)
    assert match is not None, text[:80]
    return match[1].replace("`", "")


def _first_sentence(text: str) -> str:
    """Returns the first sentence of a page's first paragraph, without markup."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n", text):
        plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", paragraph).strip()
        if re.match(r"[A-Za-z`*]", plain):
            plain = re.sub(r"[`*]", "", plain)
            words = " ".join(plain.split())
            return re.split(r"(?<=[.:])\s(?=[A-Z])", words)[0].rstrip(":")
    return _title(text)
