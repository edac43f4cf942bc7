"""The logo and the icons, which are masks in the style sheet, so that a page loads no files for them.

An icon has the colour of the text next to it. It is hidden from screen readers, since that text carries the meaning.
"""

from typing import Final
from urllib.parse import quote

ICONS: Final = {
    "home": "M4 11l8-7 8 7v9h-5v-6H9v6H4z",
    "fleet": "M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z",
    "sessions": "M4 6h16M4 12h16M4 18h10",
    "triggers": "M13 3L5 14h6l-1 7 8-11h-6z",
    "findings": "M6 21V4h12l-3 4.5 3 4.5H6",
    "budgets": "M12 4a8 8 0 100 16 8 8 0 000-16M14.6 9.6c-.6-1.3-4.8-1.6-4.8.6s5 1.2 5 3.5-4.4 2-5.2.5M12 7.5v9",
    "audit": "M8 4h8v3H8zM8 5H6v16h12V5h-2M9 12h6M9 16h4",
    "more": "M5 12h.01M12 12h.01M19 12h.01",
    "halt": "M8.5 3h7L21 8.5v7L15.5 21h-7L3 15.5v-7zM9.5 9.5h5v5h-5z",
    "theme": "M12 4a8 8 0 100 16 8 8 0 000-16M12 4v16M14 6v12M16.5 7.5v9",
    "leave": "M10 4H5v16h5M14 8l4 4-4 4M18 12H9",
    "check": "M5 12.5l5 5 9-10.5",
    "cross": "M6 6l12 12M18 6L6 18",
    "clock": "M12 4a8 8 0 100 16 8 8 0 000-16M12 8v4.5l3 2",
    "alert": "M12 4l9 16H3zM12 10v4.5M12 17.3h.01",
    "moon": "M19.5 14.5A8 8 0 119.5 4.5a6.5 6.5 0 0010 10z",
    "play": "M8 5l11 7-11 7z",
    "pause": "M9 6v12M15 6v12",
    "tool": "M4 5h16v14H4zM8 10l2.5 2.5L8 15M13 15h4",
    "chat": "M4 5h16v11h-9l-4 4v-4H4z",
    "agent": "M5 9h14v10H5zM12 9V5M12 4.5h.01M9.5 13.5h.01M14.5 13.5h.01M9.5 16.5h5",
    "person": "M12 12a4 4 0 100-8 4 4 0 000 8M5 20.5c.8-4 3.5-5.5 7-5.5s6.2 1.5 7 5.5",
    "copy": "M9 9h11v11H9zM15 9V4H4v11h5",
    "save": "M12 4v11M7 11l5 5 5-5M5 20h14",
    "next": "M9 6l6 6-6 6",
    "paper": "M7 3h7l4 4v14H7zM14 3v4h4M10 12h5M10 16h5",
    "plus": "M12 5v14M5 12h14",
    "edit": "M5 19l1-4L16 5l3 3L9 18z",
    "search": "M11 4a7 7 0 100 14 7 7 0 000-14M16 16l4.5 4.5",
    "bell": "M6 17V11a6 6 0 0112 0v6l1.5 1.5h-15zM10.5 21h3",
}
"""SVG paths on a square of 24."""

LOGO: Final = (
    '<rect width="32" height="32" rx="8" fill="#3145c4"/>'
    '<g fill="none" stroke="#fff" stroke-width="3.2" stroke-linecap="round">'
    '<path d="M9.5 7.5v17M22.5 7.5v17M9.5 16h2.6M19.9 16h2.6"/><circle cx="16" cy="16" r="3.9"/></g>'
)
"""A rope between two posts, with a ring in it."""

MANIFEST_PATH: Final = "/manifest.webmanifest"
TOUCH_ICON_PATH: Final = "/touch-icon.png"


def draw_logo() -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{LOGO}</svg>\n'


def write_icon_styles() -> str:
    """Write a class for each icon."""
    rules = [f".i-{name}{{--i:{make_data_url(_make_icon(path))}}}" for name, path in ICONS.items()]
    fold = f":root{{--fold:{make_data_url(_make_icon(ICONS['next']))}}}"
    return "\n".join([*rules, fold, f".h-logo{{background-image:{make_data_url(draw_logo())}}}"])


def _make_icon(path: str) -> str:
    stroke = 'fill="none" stroke="#000" stroke-width="1.9" stroke-linecap="round" stroke-linejoin="round"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path {stroke} d="{path}"/></svg>'


def make_data_url(svg: str) -> str:
    return f'url("data:image/svg+xml,{quote(svg)}")'


def make_manifest() -> dict[str, object]:
    """Describe the dashboard to a phone that installs it."""
    icons = [
        {"src": "/login/icon.svg", "sizes": "any", "type": "image/svg+xml"},
        {"src": TOUCH_ICON_PATH, "sizes": "192x192", "type": "image/png"},
    ]
    colours = {"background_color": "#f5f6f9", "theme_color": "#3145c4"}
    return {
        "name": "Halter",
        "short_name": "Halter",
        "start_url": "/",
        "display": "standalone",
        **colours,
        "icons": icons,
    }
