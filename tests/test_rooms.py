"""Placeholder until the rooms test lands."""


def test_package_imports() -> None:
    """The package imports."""
    import kvbelay  # noqa: PLC0415

    assert kvbelay.__doc__
