"""How the dashboard looks: calm, dense, in the fonts of the machine, light or dark as the system says."""

from pathlib import Path
from typing import Final

KEPT: Final = "halter-theme"
"""Under this name a browser keeps which theme its person wants, if not that of the system."""

BEFORE: Final = f"""
const halterTheme = localStorage.getItem("{KEPT}");
if (halterTheme) setDark(halterTheme === "dark");
"""
"""What a browser does before it shows anything: take the theme that its person chose."""

SWITCH: Final = f"""() => {{
  const dark = !document.body.classList.contains("body--dark");
  localStorage.setItem("{KEPT}", dark ? "dark" : "light");
  setDark(dark);
}}"""
"""Change to the other theme, and keep that."""


def style() -> str:
    """Read the style sheet that stands beside this file."""
    return Path(__file__).with_name("style.css").read_text()
