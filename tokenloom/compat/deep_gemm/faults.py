"""What is raised for a name that is not here."""

from tokenloom.errors import InvalidArgument


class MissingName(InvalidArgument, AttributeError):
    """A name of DeepGEMM that tokenloom has not. ``hasattr`` takes it for a missing name."""
