"""Matrix products over weights that are packed once, in fp32 and int8."""
