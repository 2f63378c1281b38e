"""What setup.py writes beside the compiled module."""

version: str
commit: str | None
torch: str
cuda: str | None
archs: list[str]
