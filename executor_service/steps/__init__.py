"""Steps on the device: begun, waited for, committed, answered."""
