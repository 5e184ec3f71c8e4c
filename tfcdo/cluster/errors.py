"""The errors of training on several hosts."""


class ClusterError(RuntimeError):
    """Base of the errors between hosts: catch it to handle any of them.

    Its subclasses say how the hosts failed: `DisagreementError`, `LateHostError` and
    `RendezvousError`. The message names the host and the difference or the time-out.

    Example:
      >>> import tfcdo
      >>> issubclass(tfcdo.ClusterError, RuntimeError)
      True
    """


class DisagreementError(ClusterError):
    """The hosts do not do the same; the message names the difference."""


class LateHostError(ClusterError):
    """A host did not come to a collective within the time-out; the message names it."""


class RendezvousError(ClusterError):
    """A host is missing, or the hosts have different settings; the message names them."""
