"""How a Triton kernel is launched, and what that needs of the machine."""
