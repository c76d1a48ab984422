"""What a call is: its options, arguments, masks, and the modes of torch that it is made under."""
