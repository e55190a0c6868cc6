"""What can go wrong, in few classes: each message says what happened, on which rank, and what to do about it."""


class HpsError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(HpsError, ValueError):
    """An argument or an environment variable has a value that cannot work; names it, the value and the remedy."""


class LaunchError(HpsError, RuntimeError):
    """The processes do not form the world that the launcher promised, or MPI is missing."""


class ProtocolError(HpsError, RuntimeError):
    """Workers and server disagree: different models, different next steps, a message that does not fit its header."""


class ExchangeTimeout(HpsError, TimeoutError):
    """A rank fell silent; names the rank and what it owes."""
