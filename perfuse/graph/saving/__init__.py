"""What the forward keeps for the backward."""
