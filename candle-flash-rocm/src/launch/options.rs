//! The options of a call beside its sizes and its mask.

/// Microseconds of the host for a second launch in a call: 2.4 for a split call, 0.7 for a plain one, from C with a HIP
/// runtime that does nothing (2026-11-28).
const HOST_COST: f64 = 2.0;

/// Options of a call. The default is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Microseconds that the host needs for a second launch. A forward splits its keys where the GPU saves more.
    pub host_cost: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self { host_cost: HOST_COST }
    }
}
