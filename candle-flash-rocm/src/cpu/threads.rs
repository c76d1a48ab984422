//! rayon's threads, started before the first call.

use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Starts rayon's threads if this thread is in no pool and the process has none. If a thread cannot start, as under a
/// small limit of the address space, rayon itself would panic.
///
/// # Errors
///
/// `Error::OutOfMemory` from then on, because rayon tries only once.
pub(crate) fn start_threads() -> Result<()> {
    static REFUSED: OnceLock<Option<String>> = OnceLock::new();
    if rayon::current_thread_index().is_some() {
        return Ok(());
    }
    let refused = REFUSED.get_or_init(|| {
        let error = rayon::ThreadPoolBuilder::new().build_global().err()?;
        // Without a source, the error says that the program has started the threads already.
        std::error::Error::source(&error).map(ToString::to_string)
    });
    match refused {
        None => Ok(()),
        Some(cause) => Err(Error::OutOfMemory {
            reason: format!(
                "the host has no memory for the threads of the CPU kernels ({cause}): start the process again with a \
                 smaller RAYON_NUM_THREADS, or with a higher limit (Linux: ulimit -v and ulimit -u)"
            ),
            source: None,
        }),
    }
}
