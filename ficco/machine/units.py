"""Quantities with units, as files write them: ``64 GB/s``, ``15 us``, ``2 MiB``.

Numbers are converted by :class:`decimal.Decimal`, so a float that is written and read again is the
same float, with any prefix.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

_LARGE = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SMALL = {"": 0, "m": -3, "u": -6, "n": -9, "p": -12}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}

#: Exponents of ten of the prefixes of each unit. Large units have no small prefixes, and vice
#: versa: ``mB`` is a typing error.
PREFIXES: dict[str, dict[str, int]] = {
    "B": _LARGE,
    "B/s": _LARGE,
    "FLOP": _LARGE,
    "FLOP/s": _LARGE,
    "s": _SMALL,
}

#: Examples of quantities by unit, for messages.
EXAMPLES = {
    "B": "'2 MiB'",
    "B/s": "'64 GB/s'",
    "FLOP": "'1.5e11 FLOP'",
    "FLOP/s": "'989 TFLOP/s'",
    "s": "'15 us'",
}


def parse(text: object, unit: str) -> float:
    """The value, in the SI unit ``unit``, of a quantity such as ``"64 GB/s"``.

    Raises:
        ValueError: the number or the unit is missing or wrong.
    """
    number, _, suffix = str(text).strip().partition(" ")
    suffix = suffix.strip()
    factor = next((f for name, f in _names(unit) if name == suffix), None)
    try:
        if not isinstance(text, str) or factor is None:
            raise InvalidOperation
        value = float(Decimal(number) * factor)
    except (InvalidOperation, OverflowError):
        raise ValueError(
            f"required a quantity in {unit} such as {EXAMPLES[unit]}, got {text!r}"
        ) from None
    return value


def show(value: float, unit: str) -> str:
    """A quantity as text, with the prefix that leaves 1 to 3 digits before the point.

    Bytes are written in KiB, MiB, ... where that is shorter.
    """
    number = Decimal(repr(float(value)))
    table = PREFIXES[unit]
    fitting = [p for p, exponent in table.items() if p != "K" and number.adjusted() >= exponent]
    prefix = max(fitting, key=table.__getitem__) if fitting else min(table, key=table.__getitem__)
    if not number:
        prefix = ""
    text = f"{_digits(number.scaleb(-table[prefix]))} {prefix}{unit}"
    if unit == "B":
        binary = [
            f"{int(value) >> bits} {prefix}B"
            for prefix, bits in _BINARY.items()
            if value and value % 2**bits == 0
        ]
        text = min([text, *binary], key=len)
    return text


def _digits(number: Decimal) -> str:
    if abs(number.adjusted()) > 20:
        return str(number)
    digits = f"{number:f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _names(unit: str) -> list[tuple[str, Decimal]]:
    names = [(prefix + unit, Decimal(10) ** e) for prefix, e in PREFIXES[unit].items()]
    if unit in ("B", "B/s"):
        names += [(prefix + unit, Decimal(2**bits)) for prefix, bits in _BINARY.items()]
    return names
