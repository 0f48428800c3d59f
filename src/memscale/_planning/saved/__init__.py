"""Plans that are kept: given by the user, or found in the cache by a fingerprint of the job."""
