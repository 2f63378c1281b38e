"""What setup.py writes beside the compiled modules."""

version: str
commit: str | None
bindings: dict[str, tuple[str, str | None]]  # the folder of each: for which torch, with which CUDA
archs: list[str]
