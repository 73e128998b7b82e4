"""Move matrices to where they are orthogonalized, and the results back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshmuon.plan.bucket import Bucket
from meshmuon.plan.route import Route


@dataclass(frozen=True, slots=True)
class Pending:
    """Matrices that are on their way, or already here."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """Return the matrices once they are here."""
        return self.tensor


class Exchange:
    """Carries out the transfers of buckets. A bucket without transfers is already where it should be."""

    def gather(self, bucket: Bucket, inputs: Tensor) -> Pending:
        """Bring a bucket's whole matrices together where they are orthogonalized.

        Args:
            bucket: Whose transfers to carry out.
            inputs: What this rank holds of them.

        Returns:
            The whole matrices, once waited for.
        """
        assert bucket.route is Route.LOCAL
        return Pending(inputs)

    def scatter(self, bucket: Bucket, directions: Tensor) -> Pending:
        """Bring directions back to the ranks that hold the parameters: the inverse of `gather`.

        Args:
            bucket: Whose transfers to carry out.
            directions: What was computed here.

        Returns:
            What this rank's parameters need, once waited for.
        """
        assert bucket.route is Route.LOCAL
        return Pending(directions)
