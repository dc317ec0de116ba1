"""A log that still grows: where its run stands, and when it leaves its band."""
