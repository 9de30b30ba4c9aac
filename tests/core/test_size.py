"""The package only gets smaller."""

import pytest
import size_figures

FOUND = size_figures.figures(size_figures.ROOT)


@pytest.mark.parametrize("what", size_figures.limits())
def test_a_figure_only_falls(what):
    limit = size_figures.limits()[what]
    assert FOUND[what] <= limit, (
        f"{what}: {FOUND[what]:,}, and at most {limit:,} are allowed. Remove "
        "what the change replaces, or find the mechanism that carries it."
    )
    assert FOUND[what] >= limit, (
        f"{what}: {FOUND[what]:,}, which is less than {limit:,}. Write it "
        "down: python tests/size_figures.py --lower"
    )


def test_a_limit_is_lowered_and_never_raised(monkeypatch, tmp_path):
    limits = tmp_path / "size_limits.toml"
    limits.write_text(
        '[limits]\n"files of the package" = 9999\n"private names" = 1\n'
    )
    monkeypatch.setattr(size_figures, "LIMITS", limits)
    size_figures.lower()
    assert size_figures.limits() == {
        "files of the package": FOUND["files of the package"],
        "private names": 1,
    }
