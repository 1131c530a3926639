"""Loop-level IR: dtypes, index algebra, scalar expressions and the immutable Program."""
