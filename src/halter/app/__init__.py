"""The one place where mind and hands meet: stores and tools are made here and given to whoever needs them."""

from halter.app.opened import App, open_app

__all__ = ["App", "open_app"]
