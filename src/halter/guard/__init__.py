"""The two doors: every call and every model request passes here, is judged, held and settled."""
