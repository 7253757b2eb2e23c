"""What nobody may have more of than is good for the others: counted, paced, refused with the key that raises it."""
