"""Numbers written out in English and German: a small parallel text by rule, for first runs of translation.

The languages differ in order: German says the units before the tens ("dreiundvierzig", forty-three), in one word.
"""

from __future__ import annotations

from linrope.data.batches.shuffling import permute
from linrope.data.corpus.splits import SPLITS

LARGEST = 999_999
SIZES = {"train": 20_000, "val": 1_000, "test": 1_000}
"""Pairs of each split. No number is in two of them."""
TO_NINETEEN = {
    "en": "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen",
    "de": "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn",
}
TENS = {
    "en": "zero ten twenty thirty forty fifty sixty seventy eighty ninety",
    "de": "null zehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
}
ENGLISH, GERMAN = (TO_NINETEEN[language].split() for language in ("en", "de"))
ENGLISH_TENS, GERMAN_TENS = (TENS[language].split() for language in ("en", "de"))


def english(number: int) -> str:
    """The words of a number from 0 to LARGEST: "two hundred and forty-three thousand and one"."""
    if number < 20:
        return ENGLISH[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return ENGLISH_TENS[tens] + (f"-{ENGLISH[units]}" if units else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{ENGLISH[hundreds]} hundred" + (f" and {english(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    between = " and " if rest < 100 else " "
    return f"{english(thousands)} thousand" + (f"{between}{english(rest)}" if rest else "")


def german(number: int) -> str:
    """The word of a number from 0 to LARGEST: "zweihundertdreiundvierzigtausendeins"."""
    return _german(number) + ("s" if number % 100 == 1 else "")  # "eins" at the end, "ein" before another part


def _german(number: int) -> str:
    if number < 20:
        return GERMAN[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return (f"{GERMAN[units]}und" if units else "") + GERMAN_TENS[tens]
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{GERMAN[hundreds]}hundert" + (_german(rest) if rest else "")
    thousands, rest = divmod(number, 1000)
    return f"{_german(thousands)}tausend" + (_german(rest) if rest else "")


LANGUAGES = {"en": english, "de": german}


def number_pairs(split: str, source: str, target: str) -> tuple[list[str], list[str]]:
    """The lines of a split in two of LANGUAGES: numbers in random order, always the same ones."""
    first = sum(SIZES[earlier] for earlier in SPLITS[: SPLITS.index(split)])
    numbers = [permute(i, LARGEST + 1) for i in range(first, first + SIZES[split])]
    return list(map(LANGUAGES[source], numbers)), list(map(LANGUAGES[target], numbers))
