"""English words for the whole numbers from 0 to 1000."""

LARGEST = 1000
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number: int) -> str:
    """Spell a number as in 'three hundred forty-two'."""
    if not 0 <= number <= LARGEST:
        raise ValueError(f"{number} is not between 0 and {LARGEST}")
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens = _TENS[number // 10 - 2]
        return f"{tens}-{_SMALL[number % 10]}" if number % 10 else tens
    if number == LARGEST:
        return "one thousand"
    hundreds = f"{_SMALL[number // 100]} hundred"
    return f"{hundreds} {in_words(number % 100)}" if number % 100 else hundreds
