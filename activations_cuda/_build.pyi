"""What setup.py writes beside the compiled modules."""

version: str
commit: str | None
bindings: dict[str, tuple[str, str | None]]  # folder: torch version, CUDA version or None
archs: list[str]
