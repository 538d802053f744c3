"""What the host writes for a step, and what the device finds out about its rows before and after."""
