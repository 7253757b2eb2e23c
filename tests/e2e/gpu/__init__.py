"""GPUs: against the fake where there is none, against the driver where there is."""
