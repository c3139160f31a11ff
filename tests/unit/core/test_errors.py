from kvferry.core import errors


def test_codes_are_unique_and_rebuild_their_class() -> None:
    found: dict[str, type[errors.KVFerryError]] = {}
    for name in errors.__all__:
        cls = getattr(errors, name)
        if isinstance(cls, type) and issubclass(cls, errors.KVFerryError):
            assert cls.code not in found, f"{cls} and {found[cls.code]} share {cls.code!r}"
            found[cls.code] = cls
            assert type(errors.error_from_code(cls.code, "x")) is cls


def test_a_newer_peers_code_is_still_an_error() -> None:
    error = errors.error_from_code("from_the_future", "what it said")
    assert type(error) is errors.KVFerryError
    assert "what it said" in str(error)
    assert "from_the_future" in str(error)
