"""The one place where GiB, ms and % exist; everywhere else is SI base units."""

from __future__ import annotations

import math

MIB = 1024**2
GIB = 1024**3


def bytes_text(num_bytes: float) -> str:
    """Bytes for people, in binary units.

    >>> bytes_text(13_294_592)
    '12.7 MiB'
    >>> bytes_text(512)
    '512 B'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def seconds_text(seconds: float) -> str:
    """Seconds for people.

    >>> seconds_text(0.0123), seconds_text(3.21), seconds_text(192)
    ('12.3 ms', '3.2 s', '3 min 12 s')
    """
    if seconds == 0:
        return "0 s"
    if seconds < 0.001:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def count_text(number: float) -> str:
    """A large count or rate for people.

    >>> count_text(7412.0), count_text(3_322_880)
    ('7.41 k', '3.32 M')
    """
    size = float(number)
    for unit in ("", " k", " M", " G", " T"):
        if abs(size) < 1000:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:.3g} P"


def quantity_text(name: str, value: object) -> str:
    """A value shown by the unit its name carries: `_bytes`, `_s`, `_fraction`, `_per_s`.

    >>> quantity_text("step_s", 0.25), quantity_text("overlap_fraction", 0.92)
    ('250 ms', '92.0 %')
    >>> quantity_text("step_s", float("nan")), quantity_text("loss", "diverged")
    ('nan', 'diverged')
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if name.endswith("_bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if name.endswith("_per_s"):
        return f"{count_text(value)}/s"
    if name.endswith("_fraction"):
        return f"{value * 100:.1f} %"
    if name.endswith("_bytes"):
        return bytes_text(value)
    return seconds_text(value) if name.endswith("_s") else f"{value:.4g}"
