//! A launch is filled by name: a call gives values to names, and each kernel picks the arguments that it has.

use super::{Argument, Operand};
use crate::error::{Error, Result};

/// Declares the arguments that a call of this crate can give a value to.
macro_rules! names {
    ($($name:ident)*) => {
        /// An argument of a kernel, by the name that it has in the kernel's source.
        #[allow(non_camel_case_types, missing_docs)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Name { $($name),* }

        impl Name {
            /// Every argument that a call of this crate can give a value to.
            pub const ALL: &'static [(&'static str, Self)] = &[$((stringify!($name), Self::$name)),*];
        }
    };
}

names! {
    q k v out lse delta dout dq dk dv norms partial partial_lse
    cu_seqlens_q cu_seqlens_k seqused_k leftpad_k alibi_slopes rng_state block_table sinks bias
    k_new v_new q_turned cos sin cache_batch_idx rotary_seqlens
    q_descale k_descale v_descale
    scale softcap p_dropout page_inverse
    stride_qb stride_qm stride_qh stride_kb stride_kn stride_kh stride_vb stride_vn stride_vh
    stride_ob stride_om stride_oh stride_gb stride_gm stride_gh
    stride_dqb stride_dqm stride_dqh stride_dkb stride_dkn stride_dkh stride_dvb stride_dvn stride_dvh
    stride_lb stride_lm stride_lh stride_ab stride_tb stride_sb stride_sh stride_sm
    stride_nb stride_nm stride_nh stride_wb stride_wm stride_wh stride_cm
    stride_ps stride_pb stride_pm stride_ph stride_rs stride_rb stride_rm stride_rh
    page_size page_shift nheads nheads_k group parts seqlen_q seqlen_k seqlen_new capacity total_k head_dim head_dim_v
    window_left window_right m_blocks n_blocks planes chunk lse_rows num_splits flags
    rotary_half places k_blocks q_blocks
    batch rows sums first diagonals planes_b planes_h dbias dsinks
    x y amax descale limit seqlen kind mean scales blocks smooth q_scales k_scales stride_vd
    stride_xb stride_xm stride_xh stride_yb stride_ym stride_yh
    tiles tile_counts block_mask key_ranges ids_q ids_k lists_b lists_h list_length block_q block_k ranges_b ranges_h
    ids_qb ids_kb hidden_queries hidden_b hidden_h block_m block_n lists by_keys
}

/// Gives arguments their values: `set!(values.sizes: nheads = 8, group = 2)`.
macro_rules! set {
    ($values:ident.$kind:ident: $($name:ident = $value:expr),*) => {
        $values.$kind(&[$(($crate::launch::signature::Name::$name, $value)),*])
    };
}
pub(super) use set;

/// The (batch, row, head) strides of a tensor.
pub(super) type Strides = [Name; 3];

/// The values of a call's arguments, by name.
#[derive(Clone)]
pub(super) struct Values([Option<Scalar>; Name::ALL.len()]);

#[derive(Clone, Copy)]
enum Scalar {
    Pointer(u64),
    I32(i32),
    F32(f32),
}

impl Values {
    pub fn new() -> Self {
        Self([None; Name::ALL.len()])
    }

    fn set<T: Copy>(&mut self, values: &[(Name, T)], scalar: fn(T) -> Scalar) {
        for &(name, value) in values {
            self.0[name as usize] = Some(scalar(value));
        }
    }

    /// Addresses, 0 for a tensor that the call lacks.
    pub fn pointers(&mut self, values: &[(Name, u64)]) {
        self.set(values, Scalar::Pointer);
    }

    pub fn floats(&mut self, values: &[(Name, f32)]) {
        self.set(values, Scalar::F32);
    }

    pub fn ints(&mut self, values: &[(Name, i32)]) {
        self.set(values, Scalar::I32);
    }

    pub fn sizes(&mut self, values: &[(Name, usize)]) -> Result<()> {
        for &(name, size) in values {
            self.0[name as usize] = Some(Scalar::I32(int(size)?));
        }
        Ok(())
    }

    /// The address and the strides of a tensor, these in units of `vec` elements.
    pub fn operand(&mut self, name: Name, strides: Strides, operand: &Operand, vec: usize) -> Result<()> {
        self.pointers(&[(name, operand.address)]);
        let sizes = [operand.batch, operand.row, operand.head].map(|stride| stride / vec);
        self.sizes(&[(strides[0], sizes[0]), (strides[1], sizes[1]), (strides[2], sizes[2])])
    }
}

/// The names of a kernel's arguments, in order.
#[derive(Clone, Debug)]
pub struct Signature(Vec<(String, Option<Name>)>);

impl Signature {
    /// From the names in a manifest, separated by spaces.
    #[must_use]
    pub fn parse(names: &str) -> Self {
        let known = |text: &str| Name::ALL.iter().find(|(name, _)| *name == text).map(|&(_, name)| name);
        Self(names.split_whitespace().map(|text| (text.to_owned(), known(text))).collect())
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// The place of an argument, if the kernel has it.
    #[must_use]
    pub fn position(&self, name: &str) -> Option<usize> {
        self.names().position(|one| one == name)
    }

    pub(super) fn has(&self, name: Name) -> bool {
        self.0.iter().any(|&(_, known)| known == Some(name))
    }

    /// The arguments of a launch. `values` may have names that other kernels take.
    pub(super) fn fill(&self, kernel: &str, values: &Values) -> Result<Vec<Argument>> {
        let argument = |(text, name): &(String, Option<Name>)| {
            let Some(name) = *name else {
                return Err(Error::store(format!(
                    "kernel {kernel} takes an argument {text}, which this crate does not know: build the store and the \
                     crate from one revision"
                )));
            };
            match values.0[name as usize] {
                Some(Scalar::Pointer(address)) => Ok(Argument::Pointer(address)),
                Some(Scalar::I32(number)) => Ok(Argument::I32(number)),
                Some(Scalar::F32(number)) => Ok(Argument::F32(number)),
                None => Err(Error::store(format!(
                    "kernel {kernel}: the launch has no value for the argument {text}: build the store and the crate \
                     from one revision"
                ))),
            }
        };
        self.0.iter().map(argument).collect()
    }
}

fn int(size: usize) -> Result<i32> {
    i32::try_from(size).map_err(|_| {
        Error::Unsupported(format!("a size of {size} is beyond the 32 bits of the kernels: pass fewer rows at once"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_and_an_unknown_name_are_errors() {
        let mut values = Values::new();
        values.pointers(&[(Name::q, 64)]);
        values.sizes(&[(Name::nheads, 8), (Name::group, 2)]).expect("sizes");
        let fill = |names| Signature::parse(names).fill("fwd-x", &values).map_err(|error| error.to_string());
        assert_eq!(fill("group q"), Ok(vec![Argument::I32(2), Argument::Pointer(64)]));
        let missing = fill("q k").expect_err("no k");
        assert!(missing.contains("kernel fwd-x: the launch has no value for the argument k"), "{missing}");
        let unknown = fill("q made_up").expect_err("an unknown name");
        assert!(unknown.contains("kernel fwd-x takes an argument made_up"), "{unknown}");
        let large = values.sizes(&[(Name::group, 1 << 31)]).expect_err("too large").to_string();
        assert!(large.contains("2147483648"), "{large}");
    }
}
