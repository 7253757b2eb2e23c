/* bundle.h: a list of arrays as the value of a call that is remembered, and one as its result. */
#ifndef COLLECTIVED_BUNDLE_H
#define COLLECTIVED_BUNDLE_H

#include "repeats.h"

struct bundle;

/* Of (inputs, outputs, others), the former two in the order of the plan's leaves: (place in the list, dtype, shape, bytes). Others
 * are arrays of the value that say what comes, and are not read. NULL with an error set. */
struct bundle *make_bundle(const struct plan *plan, PyObject *parts);
void free_bundle(struct bundle *bundle);
/* Takes hold of all arrays of `value`, and of `out`, or of new ones in a new list; `into` is the list of the result, or NULL. 1; or 0:
 * these are others than were remembered, or a result would be written over what is still read; or -1 with an error set. */
int take_bundle(const Repeats *r, const struct bundle *bundle, struct held *h, PyObject *value, PyObject *out, PyObject **into);
/* The arrays of the value, and of the result, that the job holds: each a new list in the order in which the caller has them, or None. 0, or -1 with an
 * error set. */
int list_held(const struct bundle *bundle, const struct held *h, PyObject **value, PyObject **result);
/* Arrays that it holds. While it compares others, it needs room for one more. */
int bundle_size(const struct bundle *bundle);

#endif
