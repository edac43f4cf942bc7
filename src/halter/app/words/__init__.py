"""What all faces say in the same words: events, moments, and the sheets that a receipt is shown on."""
