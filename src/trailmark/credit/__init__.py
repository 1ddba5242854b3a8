"""Credit: pure numpy functions (float64) from rewards and values to returns and advantages."""
