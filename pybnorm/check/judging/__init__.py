"""The judge: reference, bound, verdict. It calls no library."""
