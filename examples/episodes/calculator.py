"""A tool for the model, and all that is needed of one: type hints, a docstring that says what it does, and a result."""


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b
