"""`convt3d calibrate`."""
