"""The names of GPUs as their owners know them, from the products of versions.toml."""

from __future__ import annotations

import re

from rocm_wheels.matrix.versions import Target


def name(target: Target) -> str:
    """The GPUs of a target: "Radeon RX 7900 XT, RX 7900 XTX, W7900", "Strix Halo (Radeon 8060S)"."""
    products = _products(target)
    if not products:
        return target.family
    if not target.family.startswith(("MI", "Radeon")):
        return f"{target.family} ({', '.join(products)})"
    return f"{'Radeon ' if target.family.startswith('Radeon') else ''}{', '.join(products)}"


def choices(target: Target) -> list[str]:
    """The target's family, then each of its products, each with the target: "RX 7900 XTX (gfx1100)"."""
    return [f"{each} ({target.name})" for each in (target.family, *_products(target))]


def _products(target: Target) -> list[str]:
    return [product for each in target.products if (product := _product(each)) not in ("", target.family)]


def _product(name: str) -> str:
    """The name of a product as it is sold: "rx7900xtx" in versions.toml is RX 7900 XTX; "" for a family name."""
    if match := re.fullmatch(r"(rx|r|w|v|mi)(\d+)([a-z]*)", name):
        series, number, suffix = (part.upper() for part in match.groups())
        return f"RX {number} {suffix}".rstrip() if series == "RX" else f"{series}{number}{suffix}"
    if not name[0].isdigit():
        return ""
    return f"{'Radeon' if re.fullmatch(r'[0-9]+[ms]', name) else 'Ryzen'} {name.upper()}"
