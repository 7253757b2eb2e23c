"""How easy English is to read, by Flesch's formula of 1948."""

from __future__ import annotations

import re


def prose(markdown: str) -> str:
    """The sentences of a page, without code, tables, headings and targets of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) (.*)", r"\n\n\1", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "code", text)


def reading_ease(markdown: str) -> float:
    """At 50 and more a text is plain enough for readers of 15 years; 0 is a contract, 100 a children's book."""
    ended = re.sub(r"\n\s*\n", ". ", prose(markdown))
    sentences = [part for part in re.split(r"[.!?](?:\s|$)", ended) if re.search(r"[A-Za-z]", part)]
    words = [word for part in sentences for word in re.findall(r"[A-Za-z][A-Za-z']*", part)]
    syllables = sum(map(count_syllables, words))
    return 206.835 - 1.015 * len(words) / len(sentences) - 84.6 * syllables / len(words)


def count_syllables(word: str) -> int:
    """Groups of vowels, less a silent e at the end."""
    plain = word.lower().removesuffix("'s")
    groups = len(re.findall(r"[aeiouy]+", plain))
    silent = plain.endswith(("e", "es", "ed")) and not re.search(r"(le|[td]ed|[sxzcg]es|[aeiouy](e|es|ed))$", plain)
    return max(1, groups - silent)
