"""Bytes and seconds in readable units."""


def size(count: float) -> str:
    """Bytes in a suitable unit, with three digits: `1.24 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def duration(seconds: float) -> str:
    """Seconds in suitable units: `0.5 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
