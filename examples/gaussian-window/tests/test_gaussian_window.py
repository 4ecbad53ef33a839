"""All that an encoding has to show."""

from gaussian_window import GaussianWindow

from toeplens.encodings import conformance


def test_it_conforms() -> None:
    print(conformance.check(GaussianWindow))
    conformance.check(GaussianWindow, widest=4.0)
