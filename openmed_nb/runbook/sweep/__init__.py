"""Which batch size is worth it: throughput and memory over sizes, and the knee from which larger ones no longer pay."""
