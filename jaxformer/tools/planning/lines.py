"""Lines that the tables of all plans have in common."""

from jaxformer.models import cost


def gib(size: int | float) -> str:
    """Bytes as GiB with two digits."""
    return f"{size / cost.GIB:.2f} GiB"


def collectives(exchanges: list[dict], digits: int) -> list[str]:
    """A line for each kind of exchange (`hlo.Collective` as a dictionary); `digits` of its MiB."""
    lines = []
    for collective in exchanges:
        axes = "*".join(collective["axes"]) or "-"
        mebibytes = f"{collective['bytes'] / 2**20:,.{digits}f}"
        lines.append(
            f"{collective['kind']:<18} {collective['count']:>5} a step over {axes}, "
            f"{mebibytes} MiB a device"
        )
    return lines


def milliseconds(seconds: dict[str, float], digits: int) -> str:
    """The parts of a step's time, in ms."""
    return ", ".join(f"{name} {1e3 * value:.{digits}f} ms" for name, value in seconds.items())


def versions(numbers: dict[str, str]) -> str:
    """The versions of jax and of the compiler, and the compiler's flags."""
    return ", ".join(f"{name} {version}" for name, version in numbers.items())
