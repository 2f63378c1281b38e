"""What setup.py writes beside the compiled modules."""

version: str
commit: str | None
torches: dict[str, str]  # by the folder of the binding
cuda: str | None  # the version of the toolkit
archs: list[str]
